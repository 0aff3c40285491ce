"""The command as people and pre-commit call it: lines, exit codes, and what it imports."""

import ast
import json
import os
import subprocess
import sys

import pytest

from accumulation_harness.lint.__main__ import found, main
from accumulation_harness.lint.flake8 import CODES, Checker
from accumulation_harness.lint.source import Source
from accumulation_harness.system.address import page_of
from tests.commands import ROOT
from tests.lint.cases import RIGHT, WRONG, flat

SCRIPT = ROOT / "harness" / "accumulation_harness" / "lint" / "__main__.py"
STANDARD = set(sys.stdlib_module_names) | {"accumulation_harness", "__main__", "org"}  # `pickle` tries `org.python`


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT["textbook"])
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "theirs.py").write_text(WRONG["not divided"][0])
    return tmp_path


def test_clean(folder, capsys):
    assert main([str(folder)]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_hit_is_one_line(folder, capsys):
    path = folder / "wrong.py"
    path.write_text(flat(after="scheduler.step()"))
    assert main([str(folder)]) == 1
    sentence = "the schedule advances with every micro-batch"
    cause = "schedule_per_micro_batch"
    assert capsys.readouterr().out == f"{path}:6:9: {cause}: {sentence} ({page_of(cause)})\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("broken.py", b"def backward(:\n", "SyntaxError"),
        ("missing.py", None, "FileNotFoundError"),
        ("bytes.py", b"x = '\xff'\n", "SyntaxError"),
        ("null.py", b"backward = 1\0\n", "SyntaxError"),
        ("cells.ipynb", b'{"cells": 1}', "ValueError: expected a notebook"),
        ("data.json", b'{"a": 1}', "ValueError: one that is called .json"),
        ("deep.py", b"backward = " + b"-" * 50000 + b"1", "MemoryError"),
        ("codec.py", b"# coding: rot13\nx = 1\n", "LookupError"),
        ("a_pipe.py", os.mkfifo, "OSError: [Errno 22] Not a regular file"),
        ("newer.py", b"match x:\n    case !:\n        backward()\n", "SyntaxError"),
    ],
)
def test_what_cannot_be_read(folder, capsys, name, content, said):
    path = folder / name
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content)
    (folder / "wrong.py").write_text(flat(after="scheduler.step()"))
    assert main([str(path), str(folder / "wrong.py")]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"{path}: expected a Python file, got {said}") and err.count("\n") == 1
    assert "schedule_per_micro_batch" in out, "the other files are read all the same"


def test_a_file_that_names_nothing_of_training_need_be_no_python(folder, capsys):
    (folder / "template.py").write_text("print 'hello'\n")
    assert main([str(folder)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["test_trainer.py", "trainer_test.py"])
def test_hits_in_tests_are_notes(folder, capsys, name):
    (folder / name).write_text(flat(after="scheduler.step()"))
    assert main([str(folder), "--fix"]) == 0 and "look: schedule_per_micro_batch" in capsys.readouterr().out


def test_a_notebook_is_told_by_cell_and_line(tmp_path, capsys):
    cells = [
        "# Title",
        "%matplotlib inline\n!pip install torch\naccumulation_steps = 4",
        "%%bash\nls",
        flat(after="scheduler.step()"),
    ]
    kinds = ["markdown", "code", "code", "code"]
    written = [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in zip(kinds, cells, strict=True)]
    (tmp_path / "training.ipynb").write_text(json.dumps({"cells": written}))
    assert main([str(tmp_path)]) == 1
    assert ":cell 4:6:9: schedule_per_micro_batch" in capsys.readouterr().out


def test_sarif_has_each_hit_and_each_note(folder, capsys):
    """A note changes no exit code, and flake8 is not told it."""
    note = flat(loss="loss_of(model, x, y)")
    (folder / "wrong.py").write_text(note)
    assert main([str(folder)]) == 0 and "look: loss_not_divided" in capsys.readouterr().out
    assert not list(Checker(ast.parse(note), note.splitlines(keepends=True)).run())
    (folder / "other.py").write_text(flat(after="scheduler.step()"))
    assert main(["--format", "sarif", str(folder)]) == 1
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["ruleId"], one["level"]) for one in run["results"]] == [
        ("schedule_per_micro_batch", "error"),
        ("loss_not_divided", "note"),
    ]
    assert {one["id"] for one in run["tool"]["driver"]["rules"]} == {one["ruleId"] for one in run["results"]}


@pytest.mark.parametrize("command", [[str(SCRIPT)], ["-m", "accumulation_harness.lint"]], ids=["script", "module"])
def test_only_the_standard_library_is_imported(folder, command):
    """As a script it runs in any folder, in an interpreter that has no packages (`-S`)."""
    at = ROOT / "harness" if command[0] == "-m" else folder
    done = subprocess.run(
        [sys.executable, "-S", "-X", "importtime", *command, str(folder)], cwd=at, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()[1:]}
    assert "ast" in imported and imported <= STANDARD, imported - STANDARD


def test_the_hook_is_a_command_of_the_wheel_and_installs_nothing_else():
    """What `pip install .` of pre-commit's is told besides; that the lint needs nothing else is tested above."""
    hook, project = ((ROOT / name).read_text() for name in (".pre-commit-hooks.yaml", "pyproject.toml"))
    assert "  entry: accumulation-lint\n  language: python\n  additional_dependencies: [--no-deps]" in hook
    assert '\naccumulation-lint = "accumulation_harness.lint.__main__:main"\n' in project


@pytest.mark.parametrize("name", WRONG)
def test_flake8_is_told_the_same(name):
    source, cause = WRONG[name]
    hits = list(Checker(ast.parse(source), source.splitlines(keepends=True)).run())
    assert {(line, column + 1) for line, column, *_ in hits} == {(hit.line, hit.column) for hit in found(Source(source))}
    assert f"ACC{CODES[cause]}" in {text.split()[0] for _, _, text, _ in hits} and len(set(CODES.values())) == len(CODES)
