"""Every cause that the audit can name has a remedy, and every remedy names a loop that is audited as right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from harness.audit.evidence import CAUSES, Finding
from harness.audit.report import remedy
from harness.judge.diagnosis import UNEXPLAINED
from tests.audit.loops import lookalikes, lost_gradients, unusual_loops
from tests.audit.loops.replicas import CASES
from tests.audit.loops.right_loops import RIGHT

ROOT = Path(__file__).parents[2]
RULES = ("findings", "gradient_rules", "ranks", "session")


def headings() -> set[str]:
    return set(re.findall(r"^## (\w+)$", (ROOT / "docs/remedies.md").read_text(), flags=re.M))


def test_every_cause_has_a_section_and_every_section_a_cause() -> None:
    assert len(CAUSES) == len(set(CAUSES)) == 32
    assert headings() == {*CAUSES, UNEXPLAINED}


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_is_given_by_some_rule_and_its_finding_links_to_its_section(cause: str) -> None:
    texts = [ast.walk(ast.parse((ROOT / f"harness/audit/{name}.py").read_text())) for name in RULES]
    assert any(isinstance(node, ast.Constant) and node.value == cause for nodes in texts for node in nodes)
    page, separator, section = remedy(cause).partition("#")
    assert separator and f"\n## {section}\n" in (ROOT / page).read_text()


def test_a_finding_of_no_known_cause_is_refused() -> None:
    with pytest.raises(ValueError, match="expected cause"):
        Finding(4, 0, "loss_not_devided", {}, "")


def test_every_remedy_names_a_loop_that_is_audited_as_right() -> None:
    right = {loop.__name__ for loop in RIGHT} | {f"replicas.{loop.__name__}" for loop, causes in CASES.items() if not causes}
    right |= {f"unusual_loops.{loop.__name__}" for loop in unusual_loops.RIGHT}
    right |= {f"lookalikes.{loop.__name__}" for loop in lookalikes.RIGHT}
    right |= {f"lost_gradients.{loop.__name__}" for loop in lost_gradients.RIGHT}
    right |= {"accelerate_loops.documented"}
    sections = re.split(r"^## ", (ROOT / "docs/remedies.md").read_text(), flags=re.M)[1:]
    for section in sections:
        names = re.findall(r"`([\w.]+)`", section.partition("Right:")[2])
        assert (names and set(names) <= right) or section.startswith("unexplained"), section
