"""What a wheel installs: one import root, commands that work in a folder full of our own names, and a base of torch and numpy."""

import csv
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from accumulation_harness.__main__ import COMMANDS
from tests.commands import ROOT

OF_SWEEPS = ("rich", "pandas", "hydra", "wandb", "scipy", "sklearn", "scikit_learn", "matplotlib", "pyarrow", "omegaconf")
LOOP = """
import torch
def train(batch_size, accumulation_steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4 * batch_size * accumulation_steps, 4), torch.randn(4 * batch_size * accumulation_steps, 1)
    for window in range(4):
        for k in range(accumulation_steps):
            start = (window * accumulation_steps + k) * batch_size
            loss = (model(x[start:start + batch_size]) - y[start:start + batch_size]).square().mean()
            (loss / DIVISOR).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

HANDED = """
import numpy as np
def train(batch_size, accumulation_steps, hand):
    random = np.random.default_rng(0)
    x, y, fault = random.normal(size=(48, 8)).astype("f4"), random.normal(size=48).astype("f4"), FAULT
    w = hand(weights={"w": np.zeros(8, "f4")})["w"]
    divisor = np.float32({"undivided": batch_size, "twice": 16 * accumulation_steps}.get(fault, 16))
    for window in range(0, 48, 16):
        total = np.zeros(8, "f4")
        for k in range(accumulation_steps):
            rows = slice(window + k * batch_size, window + (k + 1) * batch_size)
            given = x[rows].T @ (x[rows] @ w - y[rows]) / divisor
            hand(contribution={"w": given})
            total += given * (fault != "lost" or k not in (1, 2))
        hand(gradient={"w": total})
        w = hand(weights={"w": w - np.float32(0.1) * total})["w"]
"""

WATCHED = """
import sys
sys.path.pop(0)  # the folder has somebody's `harness.py`
import torch
from accumulation_harness.watch import watch
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watch(model, optimizer) as seen:
    for k in range(16):
        torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
        if k % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
print(seen.report("run.json"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    (built,) = folder.iterdir()
    return zipfile.ZipFile(built)


def installed(wheel, folder, hidden=()):
    """`accumulation-harness` in a fresh environment: beside the packages of this one but for those hidden, no source tree."""
    venv.create(folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    wheel.extractall(site)
    for packages in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for package in packages.iterdir():  # .pth files, of an editable install say, are left behind
            if package.suffix != ".pth" and not (site / package.name).exists() and not package.name.lower().startswith(hidden):
                (site / package.name).symlink_to(package)
    script = folder / "bin" / "accumulation-harness"
    script.write_text(f"#!{folder}/bin/python\nimport sys\nfrom accumulation_harness.__main__ import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    return installed(wheel, tmp_path_factory.mktemp("environment"))


CLASHING = ("harness", "analysis", "experiments", "conf", "tests", "hydra_plugins", "scoreboard", "studies", "config", "sweep",
            "audit", "watch", "lint", "report", "cli", "run", "plan", "status", "doctor", "trial")  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    """A folder of somebody's own that has every name of ours, of files and of packages; to read any ends a process."""
    for number, name in enumerate(CLASHING):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else's file')\n")
        if number < 6:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("raise SystemExit('somebody else's folder')\n")
            (tmp_path / name / "config.yaml").write_text("norm: somebody else's\n")
    (tmp_path / "right.py").write_text(LOOP.replace("DIVISOR", "accumulation_steps"))
    (tmp_path / "wrong.py").write_text(LOOP.replace("DIVISOR", "1"))
    (tmp_path / "watched.py").write_text(WATCHED)
    return tmp_path


def run(command, folder, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run([command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_wheel_takes_no_name_but_its_own(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "accumulation_harness",
        "hydra_plugins",
    }  # the second is Hydra's
    assert "accumulation_harness/py.typed" in wheel.namelist()
    assert wheel.read("accumulation_harness/remedies.md") == (ROOT / "docs" / "remedies.md").read_bytes(), (
        "a report names a section of it"
    )
    (points,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "accumulation-harness = accumulation_harness.__main__:main" in points
    assert "[flake8.extension]\nACC = accumulation_harness.lint.flake8:Checker" in points
    (about,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    assert "Classifier: Framework :: Pytest" in about and "Keywords: " in about
    version = re.search(r"^Version: (.*)$", about, re.M)
    assert f"version: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{version[1]}] - 2" in (ROOT / "CHANGELOG.md").read_text()
    needed = [line for line in about.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert sorted(line.split()[1].partition(">")[0] for line in needed) == ["numpy", "packaging", "torch", "typing-extensions"]


TINY = ("norm=none", "steps=3", "algebra_steps=3", "effective_batch=16", "accumulation_steps=[4]")


@pytest.mark.slow  # a part of continuous integration
def test_all_commands_in_a_folder_full_of_our_names(command, hostile):
    """Trials, their forkserver, an audit's process and the report find their own modules; somebody's stay unread."""

    def said(*arguments, code=0):
        done = run(command, hostile, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    shown = said("--help")
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert "expected one of run, report, audit" in said("trane", code=2)
    said("run", "-m", "seed=1,2", "name=mine", *TINY, "tracking=disabled")
    assert "2" in said("status")
    said("report")
    with (hostile / "reports" / "verdicts.csv").open() as file:
        assert [row["verdict"] for row in csv.DictReader(file) if row["arm"] == "accumulated"] == ["equivalent"] * 2
    assert (hostile / "reports" / "index.html").exists()
    assert "expected a folder with offline runs" in said("sync", code=2)  # tracking was disabled
    assert "N = " in said("plan", "memory=1GB", *TINY[:4])
    options = ("--batch-size", "16", "--accumulation-steps", "4")
    assert "loss_not_divided" in said("audit", "wrong.py:train", *options, code=1)
    assert run(command.parent / "python", hostile, "watched.py").returncode == 0
    assert "loss_not_divided" in said("watch", "compare", "run.json", "run.json")
    assert "torch" in said("doctor")
    assert "wrong.py:" in said("lint", "wrong.py", code=1)


PLUGIN = """
import sys
def test_nothing_is_imported_until_it_is_used():
    ours = {name for name in sys.modules if name.startswith(("accumulation_harness", "torch", "numpy", "hydra", "pandas"))}
    assert ours == {"accumulation_harness", "accumulation_harness.audit", "accumulation_harness.audit.pytest_plugin"}
"""


def test_the_pytest_plugin_harms_nobody(command, hostile):
    """In every session of the environment; other plugins, which have imports of their own, are off."""
    (hostile / "tests" / "__init__.py").write_text("")
    (hostile / "tests" / "test_theirs.py").write_text(PLUGIN)
    tested = ("-m", "pytest", "-q", "-p", "accumulation_harness.audit.pytest_plugin", "tests")
    done = run(command.parent / "python", hostile, *tested, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("", "equivalent"),
        ("undivided", "loss_not_divided"),
        ("twice", "loss_divided_twice"),
        ("lost", "count 1, 0, 0, 1 times: numbers 2, 3 lost"),
    ],
)
def test_without_torch_a_loop_of_another_library_is_audited(wheel, tmp_path, hostile, fault, verdict):
    command = installed(wheel, tmp_path / "environment", (*OF_SWEEPS, "torch", "functorch", "psutil"))
    (hostile / "loop.py").write_text(HANDED.replace("FAULT", repr(fault)))
    done = run(command, hostile, "audit", "loop.py:train", "--batch-size", "16", "--accumulation-steps", "4")
    assert done.returncode == bool(fault) and verdict in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_torch_and_numpy_are_enough_for_an_audit(wheel, tmp_path, hostile):
    """Also for every page that it can save; what needs more says what to install."""
    command = installed(wheel, tmp_path / "environment", (*OF_SWEEPS, "psutil"))
    saved = ("report.json", "report.xml", "report.md", "report.sarif")
    pages = [f"--save={name}" for name in saved]
    done = run(command, hostile, "audit", "wrong.py:train", "--batch-size", "16", "--accumulation-steps", "4", *pages)
    assert done.returncode == 1 and "loss_not_divided" in done.stdout, done.stdout + done.stderr
    assert all((hostile / name).stat().st_size for name in saved)
    watched = run(command.parent / "python", hostile, "watched.py")
    assert "loss_not_divided" in watched.stdout, watched.stderr
    compared = run(command, hostile, "watch", "compare", "run.json", "run.json")
    assert compared.returncode == 0 and "loss_not_divided" in compared.stdout, compared.stderr
    trial = run(command, hostile, "run", "steps=1")
    assert trial.returncode == 2
    assert trial.stderr.startswith("accumulation-harness run needs hydra, ")
    assert trial.stderr.endswith(": pip install 'accumulation-harness[sweep]'\n")


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "code", "said"), [("right", 0, "equivalent"), ("wrong", 1, "loss_not_divided")])
def test_ranks_of_an_audit_in_such_a_folder(command, hostile, loop, code, said):
    """Each is a process of its own, which imports the command and the function's file."""
    (hostile / "beside.py").write_text("DIVIDES = True\n")
    path = hostile / f"{loop}.py"
    path.write_text("import beside\nassert beside.DIVIDES\n" + path.read_text())
    done = run(command, hostile, "audit", path.name + ":train", "--batch-size=16", "--accumulation-steps=4", "--processes=2")
    assert done.returncode == code and said in done.stdout, done.stdout + done.stderr
