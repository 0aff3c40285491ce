"""The README's links lead somewhere, and what it shows can be typed and is what a run prints."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accumulation_harness.audit.command import parsed, parser
from accumulation_harness.config.compose import compose_trial

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SEARCHED = os.pathsep.join(map(str, (ROOT / "harness", ROOT)))


def test_the_two_commands_and_the_picture_stand_on_its_first_screen() -> None:
    first_screen = "\n".join(README.splitlines()[:30])
    assert "make report" in first_screen and "make test" in first_screen and "![" in first_screen


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 10 and [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.S)
CONSOLES = re.findall(r"```console\n(.*?)```", README, re.S)
SLOW = ("run -m", "hf_trainer")  # a sweep of minutes, and what needs two packages more


def test_its_programs_are_python() -> None:
    for program in PROGRAMS:
        ast.parse(program)
    imported = re.findall(r"^(?:import|from) (\w+)", PROGRAMS[0], re.M)
    assert set(imported) == {"torch"}, "the first example runs after the first line of the install"


def test_every_command_is_spelt_in_one_way() -> None:
    assert re.findall(r"python -m \S+", README) == []


@pytest.mark.parametrize(
    "console",
    [
        pytest.param(text, id=text.splitlines()[0], marks=[pytest.mark.slow] if any(word in text for word in SLOW) else [])
        for text in CONSOLES
    ],
)
def test_what_it_prints_is_what_a_run_prints(console: str, tmp_path: Path) -> None:
    for program in PROGRAMS:
        if named := re.match(r"# (\w+\.py)\n", program):
            (tmp_path / named[1]).write_text(program)
    if "hf_trainer" in console:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    parts = re.split(r"^\$ accumulation-harness (.*)$", console, flags=re.M)[1:]
    assert parts and console.startswith("$ ")
    for command, printed in zip(parts[::2], parts[1::2], strict=True):
        arguments = shlex.split(command, comments=True)
        done = subprocess.run(
            [sys.executable, "-m", "accumulation_harness", *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": SEARCHED}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        missing = [part for part in map(_comparable, printed.split("[...]")) if part not in _comparable(done.stdout)]
        assert not missing, f"{missing}\nare not in\n{done.stdout}\n{done.stderr}"


def _comparable(printed: str) -> str:
    """Without the digits of roundings, which differ between processors, and wherever lines are broken."""
    return " ".join(re.sub(r"\d(\.\d+)?e-\d+( to \d(\.\d+)?e-\d+)?", "rounding", printed).split())


def test_the_skill_names_options_that_there_are() -> None:
    skill = (ROOT / "skills" / "accumulation-harness" / "SKILL.md").read_text()
    assert skill.startswith("---\nname: accumulation-harness\ndescription: ")
    (command,) = re.findall(r"accumulation-harness audit (.*?)\n```", skill, re.S)
    given = parsed(shlex.split(command.replace("\\\n", " ")))
    assert given.format == "json" and given.set and given.rest
    named = set(re.findall(r"`(--[a-z-]+)", skill))
    assert {"--set-env", "--set-file", "--in-place", "--allow"} <= named <= set(parser()._option_string_actions)


@pytest.mark.parametrize("line", re.findall(r"accumulation-harness run -m (.*)", README))
def test_its_sweeps_are_settings_that_there_are(line: str) -> None:
    """Each axis at its first value; a task is not there to be imported, and its target is checked as a setting alone."""
    overrides = [override.partition(",")[0] for override in shlex.split(line)]
    config = compose_trial(overrides)
    assert config.experiment == ("mine" if "name=mine" in overrides else "single")
