"""The benchmarks run, and give a ratio a row; what they say on a busy machine is not looked at."""

import pytest

from tests.commands import python


@pytest.mark.slow
def test_every_row_is_a_ratio():
    done = python("benchmarks/run.py", "startup", "report", "--rounds", "1", "--trials", "12")
    rows = [line.split("|")[2:4] for line in done.stdout.splitlines() if line.endswith("| 1 |")]
    assert len(rows) == 4 and all(float(cell.split()[0]) > 0 for row in rows for cell in row)
