"""What is recorded of settings drawn at random, on the page."""

from __future__ import annotations

from typing import Any

from accumulation_harness.analysis.content import Table, Text
from accumulation_harness.experiments.fault_matrix import watched


def test_the_counts_are_on_the_page_with_their_commits() -> None:
    nothing: Any = None
    told, table = watched.random_settings(nothing).blocks
    assert isinstance(told, Text) and isinstance(table, Table)
    assert "0 of 6400" in told.text and "cc2bf42" in told.text and "0 of 762" in told.text and "200ce3e" in told.text
    assert len(table.rows) == 14 and {row[1] for row in table.rows} == {"20"}
