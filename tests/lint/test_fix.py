"""A patch mends what is certain: the lint tells it no more, comments stay, and where it runs the audit says `equivalent`."""

import subprocess
from pathlib import Path

import pytest

from accumulation_harness.audit import audit
from accumulation_harness.lint.__main__ import found, main
from accumulation_harness.lint.fix import mended
from accumulation_harness.lint.source import Source
from tests.lint.cases import STEPS, WRONG, accelerate, flat, nested
from tests.lint.pairs import pairs
from tests.slow import few

LOOP = """
import torch
from torch.nn.functional import cross_entropy

def train(batch_size, accumulation_steps):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.arange({rows}).split(batch_size)
    x, y = torch.randn({rows}, 8), torch.randint(0, 4, ({rows},))
    for epoch in range(2):
        for i, rows in enumerate(batches):
            {before}
            loss = cross_entropy(model(x[rows]), y[rows]){divisor}  # a mean
            loss.backward()
            # no explosion
            {after}
            if {boundary}:
                {clip}
                optimizer.step()
                {end}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"
USUAL = {
    "rows": 96,
    "before": "pass",
    "divisor": " / accumulation_steps",
    "after": "pass",
    "boundary": "(i + 1) % accumulation_steps == 0",
    "clip": CLIP,
    "end": "optimizer.zero_grad()",
}
FAULTS = {
    "loss_not_divided": {"divisor": ""},
    "gradients_cleared_in_window": {"before": "optimizer.zero_grad()", "end": "pass"},
    "clip_per_micro_batch": {"after": CLIP, "clip": "pass"},
    "short_window_divided_by_n": {
        "rows": 88,
        "clip": "pass",
        "boundary": "(i + 1) % accumulation_steps == 0 or i + 1 == len(batches)",
    },
}
SLOW = few(["clip_per_micro_batch"], FAULTS)


def audited(text):
    known = {}
    exec(compile(text, "loop.py", "exec"), known)
    return audit(known["train"], batch_size=32, accumulation_steps=(4,))


@pytest.mark.parametrize("cause", SLOW)
def test_a_loop_that_is_mended_is_equivalent(cause):
    wrong = LOOP.format(**USUAL | FAULTS[cause])
    right = mended(wrong, found)
    assert {hit.cause for hit in found(Source(wrong))} == {cause} and not found(Source(right))
    assert {line.strip() for line in wrong.splitlines() if "#" in line and "loss" not in line} <= set(
        map(str.strip, right.splitlines())
    )
    assert set(audited(wrong).causes) == {cause} and audited(right).equivalent


TEXTS = {name: text for name, (text, _) in WRONG.items()} | {one.name: one.before for one in pairs()}
MENDED = 36  # of these; the others need to know more than the file says


@pytest.mark.slow
def test_what_is_mended_is_told_no_more():
    changed = {name: new for name, text in TEXTS.items() if (new := mended(text, found)) != text}
    for name, new in changed.items():
        before, after = found(Source(TEXTS[name])), found(Source(new))
        assert len(after) < len(before) and {hit.cause for hit in after} <= {hit.cause for hit in before}, name
    assert len(changed) >= MENDED


@pytest.mark.parametrize(
    "text",
    [
        flat(loss="criterion(model(x), y)")
        .replace("loss.backward()", "loss.backward(); log(loss)")
        .replace("% accumulation_steps", "% f()"),
        flat(after="norm = clip_grad_norm_(model.parameters(), 1.0)\nlog(norm)"),
        flat(before="optimizer.zero_grad(); log()"),
        flat(boundary="(i + 1) % accumulation_steps == 0 or i + 1 == len(loader)", after="log(loss * accumulation_steps)"),
        accelerate(loss="model(**batch).loss / gradient_accumulation_steps"),
        nested(inside="scheduler.step()"),
        "for j in range(0, len(x), microbatch):\n    F.mse_loss(model(x[j:j + microbatch]), y).backward()\n" + STEPS,
    ],
    ids=[
        "no number",
        "the norm is needed",
        "a line of two",
        "multiplied back",
        "another cause",
        "a schedule",
        "a number of rows",
    ],
)
def test_what_is_not_certain_stays(text):
    assert mended(text, found) == text


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_patch_is_shown_first_and_written_if_asked_for(tmp_path, capsys, monkeypatch, end):
    monkeypatch.chdir(tmp_path)
    path, real = Path("trainer.py"), Path("linked.py")
    path.symlink_to(real)
    written = ("# -*- coding: latin-1 -*-\n# für\n" + flat(before="optimizer.zero_grad()")).replace("\n", end).encode("latin-1")
    path.write_bytes(written)
    real.chmod(0o750)
    assert main(["--fix", str(path)]) == 1 and path.read_bytes() == written
    patch = capsys.readouterr().out
    assert main(["--fix", "--write", str(path)]) == 0 and main([str(path)]) == 0
    assert path.is_symlink() and real.stat().st_mode & 0o777 == 0o750
    mine = path.read_bytes()
    assert mine.count(end.encode()) == mine.count(b"\n") and "für" in mine.decode("latin-1")
    if end == "\n":
        path.unlink()
        path.write_bytes(written)
        subprocess.run(["patch", "-p0"], input=patch.encode("latin-1"), check=True, capture_output=True)
        assert path.read_bytes() == mine


def test_lines_that_end_in_several_ways_are_left_alone(tmp_path, capsys):
    path = tmp_path / "trainer.py"
    path.write_bytes((flat(before="optimizer.zero_grad()") + "\n#\r\n").encode())
    assert main(["--fix", "--write", str(path)]) == 2 and "several ways" in capsys.readouterr().err
