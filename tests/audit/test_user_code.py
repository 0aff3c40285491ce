"""Somebody's code is started as its owner does, and its surroundings are left as they were: files, trackers, this process."""

import builtins
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from accumulation_harness.audit.observe.runs import this_process_goes_on
from accumulation_harness.audit.user_code import process, scratch, trackers
from accumulation_harness.audit.user_code.call import load
from accumulation_harness.audit.user_code.settings import Settings, edited
from tests.audit.asked import everything

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the scripts close nothing
NUMBERS = Settings(words=("{batch_size}", "{accumulation_steps}"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    for name in ("out/ckpt.pt", "out/old/a.log", "data/x.bin", "runs/log.txt", "conf.yaml", "data.sqlite"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine\n")
    (folder / "data.sqlite").unlink()
    (tmp_path / "elsewhere.pt").write_text("mine")
    monkeypatch.chdir(folder)
    return folder


def script(home, text, settings=NUMBERS, *, in_place=False):
    (home / "script.py").write_text(text)
    return load("script.py", settings, in_place=in_place)


@pytest.mark.parametrize(
    ("deed", "written"),
    [
        ("open('out/ckpt.pt', 'w').write('new')", ["out/ckpt.pt"]),
        ("open('runs/log.txt', 'a').write('more'); assert open('runs/log.txt').read() == 'mine\\nmore'", ["runs/log.txt"]),
        ("import torch; torch.save({}, 'out/ckpt.pt')", ["out/ckpt.pt"]),
        ("import torch; torch.save(obj={}, f=pathlib.Path('out') / 'ckpt.pt')", ["out/ckpt.pt"]),
        ("os.makedirs('out', exist_ok=True); open('out/new.pt', 'w')", ["out/new.pt"]),
        ("os.remove('out/ckpt.pt'); assert not os.path.exists('out/ckpt.pt')", []),
        ("import shutil; shutil.rmtree('out'); os.mkdir('out'); open('out/b', 'w')", ["out/b"]),
        ("os.rename('out', 'kept'); open('kept/old/a.log', 'w')", ["kept/ckpt.pt", "kept/old/a.log"]),
        ("open('new', 'w'); os.replace('new', 'out/ckpt.pt')", ["out/ckpt.pt"]),
        ("import sqlite3; c = sqlite3.connect('runs/log.db'); c.execute('create table t(a)'); c.close()", ["runs/log.db"]),
        ("import numpy as n; n.memmap('data/x.bin', mode='r+', dtype='u1')[0] = 7", ["data/x.bin"]),
        ("open(pathlib.Path(__file__).resolve().parent / 'out' / 'ckpt.pt', 'w').write('new')", ["out/ckpt.pt"]),
        ("os.chdir('out'); open('ckpt.pt', 'w')", ["out/ckpt.pt"]),
        ("assert open('../elsewhere.pt').read() == 'mine'; open('../elsewhere.pt', 'a').write('x')", ["../elsewhere.pt"]),
        ("open('../new.pt', 'w')", ["../new.pt"]),
        ("assert open('data/x.bin').read() == 'mine\\n'", []),
        ("import subprocess; subprocess.run('echo new > runs/new.txt', shell=True)", ["runs/new.txt"]),
    ],
)
@pytest.mark.parametrize("largest", [1 << 20, 0], ids=["copied", "linked"])
def test_files_are_read_from_the_folder_and_written_to_another(home, deed, written, largest, monkeypatch):
    if not largest and "__file__" in deed:
        pytest.skip("no script is so large that it is linked")
    monkeypatch.setattr(scratch, "LARGEST_COPY", largest)
    code = script(home, f"import os, pathlib\n{deed}\n")
    before = everything(home.parent)
    for _ in range(2):  # the second finds nothing of the first
        code(4, 1)
    assert everything(home.parent) == before
    assert set(written) - {"kept/ckpt.pt"} <= set(code.written) <= {*written, *(["script.py"] if not largest else [])}


@pytest.mark.parametrize("deed", ["open({path!r}, 'w')", "import torch; torch.save(1, {path!r})", "os.remove({path!r})"])
@pytest.mark.parametrize("place", ["out/ckpt.pt", "../elsewhere.pt", "../new.pt"])
@pytest.mark.parametrize("is_spelled", [True, False], ids=["spelled", "composed"])
def test_what_is_named_by_its_whole_path_is_not_changed(home, deed, place, is_spelled, monkeypatch, tmp_path_factory):
    """In sources, paths of the folder become those of its image; what is there and named otherwise is refused."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("temporary")))  # what is in there is nobody's
    if (is_new := place == "../new.pt") and "remove" in deed:
        pytest.skip("it is not there")
    path = str((home / place).resolve())
    code = script(
        home, f"import os\n{deed.format(path=path if is_spelled else path.replace('home', 'hom_'))}\n".replace("m_", "m' + 'e")
    )
    before = everything(home.parent)
    for _ in range(2):
        if is_new or (is_spelled and ".." not in place):
            code(4, 1)
        else:
            with pytest.raises(PermissionError, match="audit changes no files: name a place inside the working folder, or use"):
                code(4, 1)
        assert everything(home.parent) == before
    assert not is_new or "new.pt: removed again" in " ".join(code.remarks)


def test_a_setting_in_a_folder_that_is_linked_is_changed_in_a_copy(home):
    (home / ".conf").mkdir()
    (home / ".conf/a.yaml").write_text("b: 1\nn: 1\n")
    words = [f".conf/a.yaml:{name}" + "={" + number + "}" for name, number in (("b", "batch_size"), ("n", "accumulation_steps"))]
    code = script(home, "assert open('.conf/a.yaml').read() == 'b: 4\\nn: 2\\n'", Settings.of([], [], words, []))
    before = everything(home)
    code(4, 2)
    assert everything(home) == before


SERVER = "import socket; s = socket.create_server(('127.0.0.1', PORT)); import builtins; builtins.kept = s"
LOADER = "import torch; from torch.utils.data import DataLoader as D\n"
LOADER += "for x in D(range(4), num_workers=1, multiprocessing_context='spawn', collate_fn=lambda rows: rows[0]): pass"
GROUP = "import torch.distributed as d\nd.init_process_group('gloo', init_method='tcp://127.0.0.1:PORT', rank=0, world_size=1)\n"


@pytest.mark.parametrize(
    ("deed", "written"),
    [
        ("import os; os._exit(0)", []),
        (SERVER, []),
        (LOADER, []),  # what is spawned cannot be sent a lambda
        ("import torch; torch.multiprocessing.set_start_method('spawn')", []),
        ("import signal; signal.signal(signal.SIGTERM, print); signal.alarm(100)", []),
        (
            "import atexit; atexit.register(open, 'end.txt', 'w'); atexit.register(lambda: open('own.txt', 'w'))",
            ["end.txt", "own.txt"],
        ),
        ("import atexit, threading; atexit.register(threading.Event().wait)", []),  # for ever
        (GROUP + "d.destroy_process_group()", []),
    ],
)
def test_every_run_is_like_a_process_of_its_own(home, monkeypatch, deed, written):
    monkeypatch.setattr(process, "END_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = script(home, deed.replace("PORT", str(port)))
    handler, before = signal.getsignal(signal.SIGTERM), everything(home)
    try:
        for _ in range(2):
            with this_process_goes_on():
                code(4, 1)
            assert signal.getsignal(signal.SIGTERM) is handler and everything(home) == before
        assert list(code.written) == written
    finally:
        vars(builtins).pop("kept", None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("question", ["input('name? ')", "import sys; sys.stdin.read()", "import sys; next(sys.stdin)"])
def test_nobody_answers(home, question):
    with pytest.raises(EOFError, match="the code asks for input, and during an audit nobody answers"):
        script(home, question)(4, 1)


def test_in_place_is_the_folder_itself(home):
    script(home, "open('out/ckpt.pt', 'w').write('new')", in_place=True)(4, 1)
    assert (home / "out/ckpt.pt").read_text() == "new"


def test_trackers_are_off_and_nothing_is_uploaded(home, monkeypatch):
    """Stand-ins in the place of trackers: what they are called with is what the code would have started."""
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    for name in ("mlflow", "neptune", "swanlab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (home / f"{name}.py").write_text(
            "calls = []\n"
            "def init(**given): calls.append(given)\n"
            "init_run = init\n"
            "def set_tracking_uri(uri): calls.append(uri)\n"
            "def login(key): raise SystemError\n"
        )
    code = script(
        home,
        "import os, mlflow, neptune, swanlab\n"
        f"mlflow.set_tracking_uri('http://tracker'); assert mlflow.calls == ['{trackers.LOCAL}']\n"
        "neptune.init_run(mode='async'); assert neptune.calls == [{'mode': 'debug'}]\n"
        "swanlab.login('key'); swanlab.init(mode='cloud'); assert swanlab.calls == [{'mode': 'disabled'}]\n"
        "assert os.environ['WANDB_MODE'] == 'disabled'\n",
    )
    code(4, 1)
    assert "trackers are off" in " ".join(code.remarks) and list(code.trackers) == [
        "mlflow.set_tracking_uri", "neptune.init_run", "swanlab.init"
    ]  # fmt: skip
    assert "WANDB_MODE" not in os.environ


def test_uploads_to_a_hub_are_refused_in_a_line(home):
    pytest.importorskip("huggingface_hub")
    code = script(home, "from huggingface_hub import HfApi\nHfApi(token='no').create_repo('me/model')")
    with pytest.raises(PermissionError, match="an audit uploads nothing; switch it off, as by push_to_hub=False"):
        code(4, 1)


def test_this_process_is_as_before(home):
    (home / "own.py").write_text("state = []\n")
    code = script(
        home,
        "import logging, os, random, sys, torch, own\n"
        "assert sys.argv[1:] == ['rest', '2', '3'] and __name__ == '__main__' and sys.modules['__main__'].own is own\n"
        "assert own.state == [], 'modules are fresh'\n"
        "own.state.append(1); sys.path.append('x'); os.environ['X'] = '1'; os.chdir('/'); random.seed(5)\n"
        "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False); logging.basicConfig(level=1)\n"
        "sys.exit(0)\n",
        Settings(words=NUMBERS.words, rest=("rest",)),
    )

    def seen():
        import logging
        import random

        import torch

        logged = (logging.root.level, list(logging.root.handlers))
        names = [sys.argv, list(sys.path), os.getcwd(), dict(os.environ), sys.modules["__main__"], set(sys.modules) - {"own"}]
        return [*names, *logged, random.getstate(), torch.get_default_dtype(), torch.is_grad_enabled(), sys.stdout]

    code(2, 3)
    before = seen()
    code(2, 3)
    assert seen() == before and "own" not in sys.modules


def test_last_words_are_told(home):
    code = script(home, "import argparse\nargparse.ArgumentParser().parse_args()")
    with pytest.raises(SystemExit, match=r"2; its last output was: .*unrecognized arguments: 4 1"):
        code(4, 1)


@pytest.mark.parametrize(
    ("name", "text", "key", "expected"),
    [
        ("a.yaml", "a:\n  b: 8  # rows\nb: 1\n", "a.b", "a:\n  b: 16  # rows\nb: 1\n"),
        ("a.yml", "b: 1\na:\n    c: {x: 1}\n    'b': 8\n", "a.b", "b: 1\na:\n    c: {x: 1}\n    'b': 16\n"),
        ("a.toml", "b = 1\n[a]\nb = 8 # rows\n", "a.b", "b = 1\n[a]\nb = 16 # rows\n"),
        ("a.ini", "[other]\nb = 1\n[a]\nb=8\n", "a.b", "[other]\nb = 1\n[a]\nb=16\n"),
        ("a.conf", "a.b: 8\n", "a.b", "a.b: 16\n"),
        ("a.json", ' {"c": true,\n"a": {"d": "ä\u2028", "b": 8}}', "a.b", ' {"c": true,\n"a": {"d": "ä\u2028", "b": 16}}'),
        ("a.py", "b = 1\nclass a:\n    b: int = (8 +\n 1)  # ä\n", "a.b", "b = 1\nclass a:\n    b: int = (16)  # ä\n"),
        ("a.py", "x = 'ä'; b = 8\nb = 9\n", "b", "x = 'ä'; b = 16\nb = 9\n"),
        ("a.py", "def a(n, b=8): b = 9\n", "a.b", "def a(n, b=16): b = 9\n"),
        ("a.py", "if x:\n    def a():\n        n, b = 2, 8\n", "a.b", "if x:\n    def a():\n        n, b = 2, 16\n"),
        ("a.py", "a = {'c': 1, 'b': 8}\n", "a.b", "a = {'c': 1, 'b': 16}\n"),
        ("a.py", "loader = x.a(data, b=8)\n", "a.b", "loader = x.a(data, b=16)\n"),
    ],
)
def test_a_value_in_a_file_is_exchanged(name, text, key, expected):
    assert edited(Path(name), text, key, "16") == expected
    with pytest.raises(ValueError, match=r"expected a\.x"):
        edited(Path(name), text, "a.x", "16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["--bs {batch_size}"], [], []), "expected two of {batch_size}"),
        (([], ["BATCH"], []), "expected NAME={batch_size}, got BATCH"),
        (([], [], ["conf.yaml=8"]), "expected FILE.yaml:KEY={batch_size}, got conf.yaml"),
        (([], [], ["no.yaml:a={batch_size}"]), "expected a file, got no.yaml"),
    ],
)
def test_settings_that_cannot_be_meant(home, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Settings.of(*arguments, [])


PACKAGE = {"pkg/__init__.py": "", "pkg/near.py": "N = 3", "loose/near.py": "N = 3"}
RELATIVE = "from .near import N\nclass A:\n    @staticmethod\n    def s(batch_size, accumulation_steps): return N\n"
RELATIVE += "    def m(self, batch_size, accumulation_steps): return N\n"
RELATIVE += "class B:\n    def __init__(self, batch_size, accumulation_steps): self.n = batch_size\n    def m(self): return N\n"
RELATIVE += "def main():\n    import sys\n    return len(sys.argv)\ndef f(size, steps, lr=1): return N\n"


@pytest.mark.parametrize(
    "target", ["pkg/a.py:f", "pkg.a:f", "loose/a.py:f", "pkg.a:A.s", "pkg/a.py:A.m", "pkg.a:B.m", "pkg.a:main"]
)
def test_functions_and_methods_are_found(home, target):
    for name, text in {**PACKAGE, "pkg/a.py": RELATIVE, "loose/a.py": RELATIVE}.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text)
    code = load(target, NUMBERS if target.endswith("main") else None)
    assert code(4, 2) == code(4, 2) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "p.add_argument('--bs'); p.add_argument('--grad-accum')",
            "--set '--bs {batch_size} --grad-accum {accumulation_steps}' ",
        ),
        (
            "BATCH = 8\nVAL_BATCH = 9\nGA = 2",
            "--set-file 'script.py:BATCH={batch_size}' --set-file 'script.py:GA={accumulation_steps}' ",
        ),
        (
            "def f(global_batch=8, micro_batch=2): 0",
            "'script.py:f.micro_batch={batch_size}' --set-file 'script.py:f.global_batch={total_b",
        ),
        ("open('conf.json')\nfrom near import x", "'near.py:ACCUM={accumulation_steps}'"),
        (
            "D(batch_size=4)\nif i % 9 == 0: print()\nif i % 4 == 0: o.step()",
            "script.py:3 holds a bare number, `if i % 4 == 0: o.step()`: write ACCUMULATION_STEPS = ... at",
        ),
        ("c = D({'bs': 2, 'acc': 4})\nbest_acc = 0", "--set-file 'script.py:c.acc={accumulation_steps}' (or"),
        (
            "class A:\n    bs: int = field(default=8)\n    grad_acc: int = 1",
            "'script.py:A.bs.default={batch_size}' --set-file 'script.py:A.g",
        ),
        ("main(config_path='conf')", "--set-file 'conf/run/a.yaml:batch={batch_size}'"),
        ("HfArgumentParser(Args)", "--set '--per_device_train_batch_size {batch_size} --gradient_accumulation_steps {acc"),
        ("B, T = 8, 16\ntotal_batch = 512\nn = total_batch // (B * T)", "--set-file 'script.py:total_batch={total_batch}*16'"),
    ],
)
def test_how_the_numbers_may_be_told_is_shown(home, text, words):
    (home / "script.py").write_text(text)
    (home / "near.py").write_text("ACCUM = 4")
    (home / "conf.json").write_text('{"a": {"batch_size": 4}}')
    (home / "conf" / "run").mkdir(parents=True)
    (home / "conf" / "run" / "a.yaml").write_text("batch: 8\n")
    with pytest.raises(ValueError, match=re.escape(words)):
        load("script.py")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "script.py",
            "--set '--batch {batch_size} --accumulate {accumulation_steps}' (or --set, --set-env, --set-file): script.py is a ",
        ),
        ("script.py:main", "main takes no (batch_size, accumulation_steps)"),
        ("script.py:other", "expected a function other in script.py, found none"),
        ("no.py", "expected a file, got no.py, which is not there"),
        ("notebook.ipynb:train", "takes no (batch_size"),
        ("a b", "expected SCRIPT.py, FILE.py:FUNCTION, package.module:FUNCTION or NOTEBOOK.ipynb, got a b"),
    ],
)
def test_what_is_missing_is_asked_for(home, target, words):
    (home / "script.py").write_text("options = ['--batch', '--accumulate']\ndef main(): pass\n")
    magic = ["%%bash\nrm x", "%%time\n!pip install x\nif 1:\n    %env A=1\nfiles = !ls\ndisplay(files)\nget_ipython().x()\nx?"]
    cells = [{"cell_type": "code", "source": text} for text in (*magic, "def train(): pass", "1 / 0")]
    (home / "notebook.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match=re.escape(words)):
        load(target)
