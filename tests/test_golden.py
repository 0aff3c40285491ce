"""No row of the golden table has moved, and the table says of what was planted what it is."""

import pytest

from accumulation_harness.config import Data, Norm
from accumulation_harness.judge.cause import Cause
from accumulation_harness.recipes.catalogue import FAULTS
from tests import golden
from tests.audit.test_loops import RIGHT, WRONG
from tests.recipes import test_faults
from tests.watch import test_session

# The archive is decided again in test_findings.py, beside what else it says.
GROUPS = [
    pytest.param(group, id=f"{source}: {group.name}", marks=[] if group.quick else [pytest.mark.slow])
    for source, groups in golden.SOURCES.items()
    if source != "archive"
    for group in groups()
]


@pytest.mark.usefixtures("own_objects")
@pytest.mark.filterwarnings("ignore")  # of the loops' own
@pytest.mark.parametrize("group", GROUPS)
def test_no_row_has_moved(group):
    if group.needs:
        pytest.importorskip(group.needs)
    assert golden.moved(group, group.measure()) == []


def test_a_row_that_moves_is_named():
    (group,) = golden.SOURCES["release"]()
    rows = group.measure()
    case = min(rows)
    before = golden.told(rows[case])
    assert golden.moved(group, rows | {case: ("degraded", "", "")}) == [f"release / {case}: {before} -> degraded ()"]
    del rows[case]
    assert golden.moved(group, rows | {"audits / another": ("equivalent", "", "")}) == [
        f"release / {case}: {before} -> no row", "release / audits / another: no row -> equivalent ()"
    ]  # fmt: skip


def kept(source, case):
    """The verdict and the causes of a row; what is right where it is wrong today."""
    verdict, causes, _, note = golden.table()[source, case]
    return verdict, {*causes.split("+")} - {""}, *([note] if note else [])


def test_right_loops_are_equivalent_and_wrong_ones_have_their_causes():
    for train in RIGHT:
        assert kept("audit", f"{train.__name__} / N=4") == ("equivalent", set())
        verdict, _, *note = kept("watch", f"audit's {train.__name__}")
        assert verdict != "different" or note, train
    for train, causes in WRONG.items():
        assert kept("audit", f"{train.__name__} / N=4") == ("different", causes)
        assert all(kept("audit", f"{train.__name__} / N={n}")[0] != "equivalent" for n in (2, 8, 16)) or "norm" in train.__name__
    for name in test_session.RIGHT:
        assert kept("watch", name) == ("equivalent", set())
    for cause in test_session.WRONG:
        assert kept("watch", cause) == ("different", {cause})


@pytest.mark.parametrize("name", [name for name in test_faults.SETTINGS if ("fault", f"{name} / permuted") in golden.table()])
def test_every_fault_is_named_where_it_changes_the_computation_and_nothing_else_is(name):
    config = test_faults.setting(name)
    inherent = {str(Cause.batch_statistics)} if config.norm == Norm.batch else set()
    inherent |= {str(Cause.non_separable_loss)} if config.workload.data == Data.pairs else set()
    assert kept("fault", f"{name} / permuted") == ("equivalent", set())
    for arm, cause, changes in [("accumulated", "", False), *((f.id, str(f.cause), f.changes(config)) for f in FAULTS)]:
        verdict, causes, *_ = kept("fault", f"{name} / {arm}")
        named = {cause} if changes and not (name == "adamw, text" and cause == Cause.short_window_divided_by_n) else set()
        assert causes - inherent == named, arm
        degraded = named == {"underflow_from_division"} and not inherent
        assert verdict == ("degraded" if degraded else "different" if causes else "equivalent"), arm
