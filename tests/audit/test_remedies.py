"""Every cause that the audit can name has a remedy, and every remedy names a loop that is audited as right."""

from __future__ import annotations

import re
from pathlib import Path

from experiments.trainers import unusual_loops
from experiments.trainers.replicas import CASES
from experiments.trainers.right_loops import RIGHT
from harness.audit.session import CALMED

ROOT = Path(__file__).parents[2]


def named_causes() -> set[str]:
    """Cause names in the sources of the rules."""
    catalogue = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', rules())) & headings() | {"unexplained", *CALMED.values()}
    return catalogue


def rules() -> str:
    return "".join((ROOT / f"harness/audit/{name}.py").read_text() for name in ("findings", "gradient_rules", "ranks"))


def headings() -> set[str]:
    return set(re.findall(r"^## (\w+)$", (ROOT / "docs/remedies.md").read_text(), flags=re.M))


def test_every_finding_links_to_a_section() -> None:
    given = set(re.findall(r'[ \[(]finding\([^"]*?"(\w+)", ', rules())) | set(
        re.findall(r'accumulation_steps, t, "(\w+)"', rules())
    )
    assert len(given) > 18
    assert given <= headings()
    assert headings() == named_causes()


def test_every_remedy_names_a_loop_that_is_audited_as_right() -> None:
    right = {loop.__name__ for loop in RIGHT} | {f"replicas.{loop.__name__}" for loop, causes in CASES.items() if not causes}
    right |= {f"unusual_loops.{loop.__name__}" for loop in unusual_loops.RIGHT}
    right |= {"accelerate_loops.documented"}
    sections = re.split(r"^## ", (ROOT / "docs/remedies.md").read_text(), flags=re.M)[1:]
    for section in sections:
        names = re.findall(r"`([\w.]+)`", section.partition("Right:")[2])
        assert (names and set(names) <= right) or section.startswith("unexplained"), section
