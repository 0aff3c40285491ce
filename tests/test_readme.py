"""The README's links lead somewhere, and what it and the first pages show is what is printed beside an installed wheel."""

import re
import shlex

import pytest

from accumulation_harness.audit.command import parsed, parser
from accumulation_harness.config.compose import compose_trial
from tests.commands import ROOT
from tests.test_installed import command, run, wheel  # noqa: F401 (fixtures)

README = (ROOT / "README.md").read_text()


def test_every_link_leads_to_a_file():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 10 and [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def blocks(page):
    """Language, title and text of each."""
    return re.findall(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def programs(page):
    """What is shown of files, by their names: in the title, or in a comment on the first line."""
    shown = [(title or text.partition("\n")[0], text) for language, title, text in blocks(page) if language == "python"]
    return {name.removeprefix("# "): text for name, text in shown if name.endswith(".py")}


CONSOLES = [
    (page, text)
    for page in (
        "README.md",
        *(f"docs/{name}.md" for name in ("index", "audit", "scripts", "trainers", "watch", "sweep", "your_own", "ci")),
    )
    for language, _, text in blocks(page)
    if language == "console"
]
SLOW = "accumulation-harness run"  # continuous integration runs these too, and the pages'


@pytest.mark.parametrize(
    ("page", "console"),
    [
        pytest.param(
            *(page, text),
            id=f"{page}: {text.splitlines()[0]}",
            marks=[pytest.mark.slow] if page != "README.md" or SLOW in text else [],
        )
        for page, text in CONSOLES
    ],
)
def test_what_is_shown_is_what_a_run_prints(page, console, command, tmp_path):  # noqa: F811
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text)
    if "hf_trainer" in console:
        pytest.importorskip("transformers")
        assert run(command.parent / "python", tmp_path, "-c", "import accelerate").returncode == 0, "make installs it"
    parts = re.split(r"^\$ (.*)$", console, flags=re.M)[1:]
    for line, printed in zip(parts[::2], parts[1::2], strict=True):
        program, *arguments = shlex.split(line, comments=True)
        done = run(command.parent / program, tmp_path, *arguments)
        missing = [part for part in map(_comparable, re.split(r"\[?\.\.\.\]?", printed)) if part not in _comparable(done.stdout)]
        assert not missing, f"{missing}\nare not in\n{done.stdout}\n{done.stderr}"


def _comparable(printed):
    """Without the digits of roundings, which differ between processors, and wherever lines are broken."""
    return " ".join(re.sub(r"\d(\.\d+)?e-\d+( to \d(\.\d+)?e-\d+)?", "rounding", printed).split())


def test_the_skill_names_options_that_there_are():
    skill = (ROOT / "skills" / "accumulation-harness" / "SKILL.md").read_text()
    assert skill.startswith("---\nname: accumulation-harness\ndescription: ")
    (line,) = re.findall(r"accumulation-harness audit (.*?)\n```", skill, re.S)
    given = parsed(shlex.split(line.replace("\\\n", " ")))
    assert given.format == "json" and given.rest
    named = set(re.findall(r"`(--[a-z-]+)", skill))
    assert {"--set-env", "--set-file", "--in-place", "--allow"} <= named <= set(parser()._option_string_actions)


@pytest.mark.parametrize("line", re.findall(r"`accumulation-harness run -m ([^`]*)`", README))
def test_sweeps_that_are_not_run_are_settings_that_there_are(line):
    """Each axis at its first value."""
    compose_trial([override.partition(",")[0] for override in shlex.split(line)])
