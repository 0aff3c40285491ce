"""The campaigns: a case is its seed's alone, what breaks is told, and two minutes of all of them break nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.chaos.__main__ import Tally, exit_code, found, table, try_case
from tests.chaos.campaign import ROOT, Broken, ask, prepared


def test_a_case_is_drawn_from_its_seed_and_number_alone() -> None:
    seen = []

    def attack(rng: Random, folder: Path) -> str:
        assert not list(folder.iterdir())
        seen.append(rng.random())
        return "worked"

    for number in (0, 1, 0):
        try_case("one", Tally(attack), number, 7)
    assert seen[0] == seen[2] != seen[1]


def test_what_breaks_is_counted_and_told_with_its_number() -> None:
    def attack(rng: Random, folder: Path) -> str:
        if rng.random() < 0.5:
            raise Broken("lost a trial")
        raise ZeroDivisionError("a slip of the campaign")

    tally = Tally(attack)
    for number in range(8):
        try_case("one", tally, number, 0)
    assert tally.tried == len(tally.broken) == 8
    told = table({"one": tally})
    assert "BROKEN one --case 0: " in told and "lost a trial" in told and "a slip of the campaign" in told


def test_a_campaign_that_cannot_start_has_found_nothing() -> None:
    @prepared
    def store() -> str:
        return ask([sys.executable, "-c", "import sys; sys.exit('steps=10: expected more')"], folder=ROOT, codes=(0,)).out

    idle, clear, broke = Tally(lambda rng, folder: store()), Tally(lambda rng, folder: "worked"), Tally(lambda rng, folder: 1 / 0)  # type: ignore[arg-type,return-value]
    for name, tally in {"idle": idle, "clear": clear, "broke": broke}.items():
        try_case(name, tally, 0, 0)
    assert (idle.tried, idle.broken, clear.lacks, broke.lacks) == (0, {}, "", "")
    told = table({"idle": idle, "clear": clear})
    assert "COULD NOT START idle" in told and "steps=10: expected more" in told and "BROKEN" not in told
    assert [exit_code(t) for t in ({"a": clear}, {"a": clear, "b": idle}, {"a": idle, "b": broke})] == [0, 2, 1]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ValueError(1)", "a traceback"),
        ("import time; time.sleep(60)", "no end within 1 s"),
        ("import os; os._exit(7)", "exit code 7"),
    ],
)
def test_an_answer_is_a_code_without_a_traceback_in_time(code: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(Broken, match=told):
        ask([sys.executable, "-c", code], folder=tmp_path, seconds=1 if "sleep" in code else 60)
    assert ask([sys.executable, "-c", "print('fine')"], folder=tmp_path).out == "fine\n"


def test_every_campaign_is_found() -> None:
    files = {path.stem for path in (ROOT / "tests/chaos/campaigns").glob("*.py")}
    assert found().keys() == files >= {"kills"}


@pytest.mark.slow
def test_two_minutes_of_chaos_break_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--minutes", "2", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
