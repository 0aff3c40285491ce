"""The README is short, its links lead somewhere, and what it shows can be typed."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from accumulation_harness.doctor import machine
from accumulation_harness.run import compose_trial

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MOST_WORDS = 900


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= MOST_WORDS
    first_screen = "\n".join(README.splitlines()[:30])
    assert "make report" in first_screen and "make test" in first_screen and "![" in first_screen


def test_its_durations_are_the_doctors() -> None:
    assert f"On 2 cores the report takes about {machine.REPORT_MINUTES} minutes" in README.replace("\n", " ")


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 10 and [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_its_programs_are_python() -> None:
    programs = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(programs) == 3
    for program in programs:
        ast.parse(program)
    assert "def train(batch_size: int, accumulation_steps: int)" in programs[0]
    assert len(programs[0].splitlines()) <= 16


@pytest.mark.parametrize("line", re.findall(r"accumulation-harness run -m (.*)", README))
def test_its_sweeps_are_settings_that_there_are(line: str) -> None:
    """Each axis at its first value; a task is not there to be imported, and its target is checked as a setting alone."""
    overrides = [override.partition(",")[0] for override in shlex.split(line)]
    config = compose_trial(overrides)
    assert config.experiment == ("mine" if "name=mine" in overrides else "single")
