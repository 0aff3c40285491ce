"""Every cause is shown by some loop and has a remedy, in the words of the table; every remedy names a loop audited as right."""

import re
from pathlib import Path

import pytest

from accumulation_harness.audit import audit
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.remedy import patch
from tests.audit.loops import meshes, right_loops
from tests.audit.loops.replicas import CASES
from tests.audit.patched import synchronised, trained, unsynchronised
from tests.audit.test_loops import BOTH, WRONG

PAGE = Path(__file__).parents[2] / "docs/remedies.md"


def sections():
    """Cause -> the text of its section."""
    parts = re.split(r"^## (\w+)\n", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_cause_has_a_loop_that_shows_it():
    shown = [*WRONG.values(), *CASES.values(), *(causes for _, causes in meshes.WRONG.values())]
    assert set.union(*map(set, shown)) == set(Cause)


@pytest.mark.parametrize("cause", Cause)
def test_a_section_says_what_the_table_says(cause):
    assert sections().keys() == set(Cause)
    told = re.split(r"Right:|```diff", sections()[cause])[0]
    assert " ".join(told.split()) == MEANINGS[cause].remedy


def test_every_remedy_names_a_loop_that_is_audited_as_right():
    right = {loop.__name__ for loop in right_loops.RIGHT} | {"accelerate_loops.documented"}
    right |= {f"replicas.{loop.__name__}" for loop, causes in CASES.items() if not causes}
    right |= {f"{module.__name__.rpartition('.')[2]}.{loop.__name__}" for module in BOTH for loop in module.RIGHT}
    for cause, section in sections().items():
        names = re.findall(r"`([\w.]+)`", section.partition("Right:")[2])
        assert set(names) <= right and (names or patch(Cause(cause)) or cause == Cause.unexplained), section


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("cause", [cause for cause in Cause if patch(cause)])
def test_a_patch_takes_the_fault_out(cause):
    """Its loop is audited as it is before and after."""
    ranks = cause == Cause.replicas_not_synchronised
    before, after = (unsynchronised, synchronised) if ranks else (trained(cause, mark) for mark in "-+")
    given = {"batch_size": 16, "accumulation_steps": (4,), "processes": 1 + ranks}
    plain = {"reference": after} if cause == Cause.foreign_gradients else {}  # which this loop has at N=1 as well
    assert {found.cause for found in audit(before, **given, **plain).findings} == {cause}
    assert audit(after, **given).equivalent
