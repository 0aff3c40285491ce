"""Many files: none ends in a traceback, and a thousand take no longer than one waits for."""

import ast
import random
import re
import time
from pathlib import Path

import pytest

from accumulation_harness.lint.__main__ import found, main
from accumulation_harness.lint.fix import mended
from accumulation_harness.lint.source import Source
from tests.lint.cases import RIGHT, WRONG
from tests.lint.pairs import pairs
from tests.slow import slow

TEXTS = (
    [text for text, _ in WRONG.values()] + list(RIGHT.values()) + [text for one in pairs() for text in (one.before, one.after)]
)
ODD = ["0", "None", "-1", "[]", "()", "lambda: 0", "x[0]", "*a", "1e300", '"s"', "N", "yield", "await", ":=", "{}"]


def mutated(rng):
    """A few lines of a loop are taken away, written twice, exchanged, or get another word."""
    lines = rng.choice(TEXTS).splitlines()
    for _ in range(rng.randint(1, 3)):
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        how = rng.random()
        if how < 0.15 and len(lines) > 1:
            del lines[one]
        elif how < 0.3:
            lines.insert(one, lines[other])
        elif how < 0.4:
            lines[one], lines[other] = lines[other], lines[one]
        else:
            words = re.split(r"(\w+)", lines[one])
            place = rng.randrange(len(words))
            words[place] = rng.choice([*re.findall(r"\w+", lines[other]), *ODD])
            lines[one] = "".join(words)
    return "\n".join(lines)


@pytest.mark.parametrize("number", [100, slow(10_000)])
def test_no_mutated_file_ends_in_a_traceback(number):
    rng, left = random.Random(57), number
    while left:
        text = mutated(rng)
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        found(Source(text))
        if left % 10 == 0:
            mended(text, found)
        left -= 1


@pytest.mark.slow
def test_a_thousand_files_take_less_than_two_seconds(tmp_path, capsys):
    """100 of them train, as many as in a repository of trainers; the others are this package's and its tests' own."""
    others = [path for path in sorted(Path(__file__).parents[1].rglob("*.py")) if "backward" not in path.read_text()]
    for number in range(1000):
        text = (
            TEXTS[number % len(TEXTS)]
            if number < 100
            else others[number % len(others)].read_text()[:6000].rpartition("\ndef ")[0]
        )
        (tmp_path / f"file_{number}.py").write_text(text)
    began = time.process_time()
    assert main([str(tmp_path)]) in (1, 2)
    spent = time.process_time() - began
    lines = sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir())
    capsys.readouterr()
    print(f"{lines} lines in {spent:.2f} s of processor time")
    assert spent < 2


def test_sums_of_sums_in_loops_have_an_end():
    loop = """def fit(model, optimizer, loader, rounds):
    loss = 0.0
    for batch in loader:
        for _ in range(rounds):
            loss = loss + loss + model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    assert not found(Source(loop))
