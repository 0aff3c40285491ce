"""Every cause is given by some rule and has a remedy, in the words of the table; every remedy names a loop audited as right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.pooling import disagreement
from accumulation_harness.audit.report import remedy
from accumulation_harness.audit.rules.findings import explain
from accumulation_harness.audit.rules.gradient_rules import explain_step
from accumulation_harness.judge.cause import BY_DESIGN, MEANINGS, Cause
from tests.audit.loops import lookalikes, lost_gradients, others_code, unusual_loops
from tests.audit.loops.replicas import CASES
from tests.audit.loops.right_loops import RIGHT
from tests.audit.rules.cases import ALL_EQUAL, FIRST_EQUAL, OFF, RUN, RUNS, STEPS, WINDOWS, changed

PAGE = Path(__file__).parents[2] / "docs/remedies.md"


def sections() -> dict[str, str]:
    """Cause -> the text of its section."""
    parts = re.split(r"^## (\w+)\n", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_cause_is_given_by_some_rule() -> None:
    given = {f.cause for _, changes, _ in STEPS for f in explain_step(changed(OFF, **changes))}
    given |= {f.cause for _, changes, _ in RUNS for f in explain(changed(RUN, **changes), ALL_EQUAL)}
    given |= {f.cause for _, changes, _ in WINDOWS for f in explain(changed(RUN, **changes), FIRST_EQUAL)}
    apart = Run(batch_size=4, accumulation_steps=4, ranks=2, rank_distances=(0.0, 2e-6))
    given |= {f.cause for f in disagreement(apart, 1e-6)}
    assert given == set(Cause) - set(BY_DESIGN) and disagreement(apart, 3e-6) == []


@pytest.mark.parametrize("cause", Cause)
def test_a_section_says_what_the_table_says(cause: Cause) -> None:
    assert sections().keys() == set(Cause)
    told = sections()[cause].partition("Right:")[0]
    assert " ".join(told.split()) == MEANINGS[cause].remedy
    assert remedy(cause) == f"docs/remedies.md#{cause.value}"


def test_every_remedy_names_a_loop_that_is_audited_as_right() -> None:
    right = {loop.__name__ for loop in RIGHT} | {f"replicas.{loop.__name__}" for loop, causes in CASES.items() if not causes}
    right |= {f"unusual_loops.{loop.__name__}" for loop in unusual_loops.RIGHT}
    right |= {f"lookalikes.{loop.__name__}" for loop in lookalikes.RIGHT}
    right |= {f"lost_gradients.{loop.__name__}" for loop in lost_gradients.RIGHT}
    right |= {f"others_code.{loop.__name__}" for loop in others_code.RIGHT}
    right |= {"accelerate_loops.documented"}
    for cause, section in sections().items():
        names = re.findall(r"`([\w.]+)`", section.partition("Right:")[2])
        assert (names and set(names) <= right) or cause == Cause.unexplained, section
