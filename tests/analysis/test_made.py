"""A report is made again when anything that it is made from has changed, and otherwise not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accumulation_harness.analysis import made, report


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Not of trials: what is in the files does not matter here."""
    trial = tmp_path / "results" / "equivalence" / "one"
    (trial / "wandb").mkdir(parents=True)
    (trial / "trial.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.html").write_text("page")
    return tmp_path / "results"


def rewritten(path: Path) -> None:
    """The same bytes again, with the times of before: only the system's own time tells."""
    before = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        (lambda store, out: None, True),
        (lambda store, out: (store / "equivalence/one/wandb/log").write_text("x"), True),
        (lambda store, out: rewritten(store / "equivalence/one/trial.json"), False),
        (lambda store, out: (store / "equivalence/two").mkdir() or (store / "equivalence/two/failed.json").touch(), False),
        (lambda store, out: (store / "equivalence/one/trial.json").unlink(), False),
        (lambda store, out: (out / "index.html").write_text("other"), False),
        (lambda store, out: (out / "index.html").unlink(), False),
        (lambda store, out: (out / made.RECORD).write_text("[]"), False),
    ],
)
def test_pages_stand_while_nothing_changes(store: Path, change: Callable[[Path, Path], object], stands: bool) -> None:
    out = store.parent / "out"
    assert made.standing(store, out) is None
    made.note(store, out, made.sources_of(store), ["a line"])
    assert made.standing(store, out) == ["a line"]
    change(store, out)
    assert made.standing(store, out) == (["a line"] if stands else None)


def test_the_code_counts_too(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = tmp_path / "code", tmp_path / "out"
    code.mkdir()
    (code / "a.py").touch()
    monkeypatch.setattr(made, "CODE", (code,))
    made.note(store, out, made.sources_of(store), [])
    assert made.standing(store, out) == []
    (code / "a.py").write_text("x = 1")
    assert made.standing(store, out) is None


def test_what_ends_while_the_pages_are_made_is_not_missed(store: Path) -> None:
    out, before = store.parent / "out", made.sources_of(store)
    (store / "equivalence/one/failed.json").touch()
    made.note(store, out, before, [])
    assert made.standing(store, out) is None


def test_to_find_that_nothing_has_changed_needs_no_pandas() -> None:
    code = "import sys, analysis.report; sys.exit(bool({'pandas', 'matplotlib', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert report.__doc__ is not None
