"""What a process has read is recorded with its hash, in whatever way it was read."""

import os
import subprocess

import pytest

from accumulation_harness.system import opened
from tests.commands import python

WAYS = {  # how a file, or a folder, is read
    "read.txt": "open('read.txt').read()",
    "late.py": "import late",
    "lab/inner.py": "import lab.outer",
    "lab/__init__.py": "import lab.outer",
    "by_name.py": "importlib.import_module('by' + '_name')",
    "array.npy": "np.load('array.npy', mmap_mode='r')",
    "listed": "os.listdir('listed')",
    "many": "[open(f'many/{name}').read() for name in os.listdir('many')]",
    "looked_at.txt": "os.path.exists('looked_at.txt')",
    "generator.py": "subprocess.run([sys.executable, 'generator.py'], check=True, env={**os.environ})",
    "linked": "Path('linked').resolve()",
    "$ASKED": "os.environ.get('ASKED')",
    "$HOME": "os.environ['HOME']; dict(os.environ); [value for name, value in os.environ.items()]",
    "outside/a.txt": "os.chdir('/'); open(f'{here}/outside/a.txt').read()",
}
IN_VAIN = {"absent.txt", "missing.txt", "absent.py"}
PROGRAM = """
import importlib, json, os, subprocess, sys
from pathlib import Path
import numpy as np
from accumulation_harness.system import opened
from tests.commands import python
here, sys.path[0] = os.getcwd(), os.getcwd()
opened.follow()
try:
    open("absent.txt")
except FileNotFoundError:
    pass
os.path.exists("missing.txt")
try:
    import absent
except ImportError:
    pass
os.environ["OWN"] = "1"; os.environ["OWN"]
os.environ.update(os.environ)
open("out.txt", "w").write("own"); open("out.txt").read()
Path("own.txt").write_text("x"); os.remove("own.txt")
{ways}
print(json.dumps(opened.recorded(Path(here, "results"))))
"""


def make(folder):
    import numpy as np

    for name in ("lab", "listed", "many", "outside", "results"):
        (folder / name).mkdir()
    for name in ("read.txt", "outside/a.txt", "listed/a", "looked_at.txt", *(f"many/{number}" for number in range(300))):
        (folder / name).write_text("one")
    for name in ("late.py", "by_name.py", "lab/inner.py", "lab/__init__.py"):
        (folder / name).write_text("A = 1\n")
    (folder / "lab" / "outer.py").write_text("from .inner import A\n")
    (folder / "generator.py").write_text("A = 1\n")
    (folder / "linked").symlink_to("read.txt")
    np.save(folder / "array.npy", np.zeros(3))


def change(path):
    if path.is_symlink():
        path.unlink()
        path.symlink_to("looked_at.txt")
    elif path.is_dir():
        (path / "new").write_text("")
    else:
        path.write_bytes(path.read_bytes()[:-1] + b" ")  # as long as before


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("read")
    make(folder)
    code = PROGRAM.replace("{ways}", "\n".join(WAYS.values()))
    (folder / "program.py").write_text(code)
    for _ in range(2):  # the second time modules come from their compiled files
        found = python("program.py", cwd=folder, PYTHONDONTWRITEBYTECODE="")
    return folder, eval(found.stdout)["files"]


def test_all_that_was_read_is_recorded_and_nothing_else(read):
    folder, files = read
    here = {name for name in files if not os.path.isabs(name)}  # modules are looked for in other folders as well
    assert here == {*WAYS, *IN_VAIN, "lab/outer.py", "numpy", "absent"}
    assert opened.changed(files, str(folder), folder / "results") == ""


@pytest.mark.parametrize("name", [*WAYS, *sorted(IN_VAIN)])
def test_whatever_changes_is_named(read, name, tmp_path, monkeypatch):
    folder, files = read
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", folder, copy], check=True)
    assert opened.changed(files, str(copy), copy / "results") == "", "the same content in another folder"
    if name.startswith("$"):
        monkeypatch.setenv(name[1:], "another")
    elif name in IN_VAIN:
        (copy / name).write_text("here")
    else:
        change(copy / name)
    said = "is there now" if name in IN_VAIN else "has changed"
    assert opened.changed(files, str(copy), copy / "results") == f"{name} {said}"
