"""Before a card: the stages of `make gpu` start and end on a stand-in, and what fails loses no other."""

import shutil
import tarfile

import pytest

from tests.commands import ROOT, python

# Each in a way of its own: a mistake, a hang, a crash, a stage that cannot start, a mistake before one that is right.
PLANTED = """
def mistake(here):
    yield {"what": "found before"}
    here.no_such_thing

def hang(here):
    time.sleep(1000)

def crash(here):
    os.kill(os.getpid(), 11)

def right(here):
    yield {"what": "a right one", "holds": True, "number": "1"}

if sys.argv[1] == "large":
    import no_such_package
STAGES["machine"] = {"right": right, "mistake": mistake}
STAGES["claims"] = {"hang": hang, "right": right}
STAGES["grid"] = {"crash": crash, "right": right}
STAGES["planner"] = {"mistake": mistake, "right": right}
STAGES["cost"] = {"right": right}

if __name__ == "__main__":
"""


def tree(folder):
    """The checkout, with benchmarks that may be changed."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name == "benchmarks":
            shutil.copytree(path, folder / path.name)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def rehearse(root, out, minutes):
    done = python(root / "benchmarks/gpu.py", "--device", "cpu", "--minutes", minutes, "--out", out, code=None)
    with tarfile.open(out / "gpu.tar.gz") as archive:
        archive.extractall(out, filter="data")
    assert (out / "gpu.tar.gz").stat().st_size < 16 * 2**20 and (out / "table.md").read_text() in done.stdout, done.stderr
    lines = [line[2:-2].split(" | ") for line in (out / "table.md").read_text().splitlines()[2:]]
    return done.returncode, lines


@pytest.mark.slow
def test_every_stage_starts_and_ends(tmp_path):
    """Eight minutes are the most that it may take: on two idle cores it takes two."""
    root, out = tree(tmp_path / "tree"), tmp_path / "out"
    code, lines = rehearse(root, out, 8)
    table = "\n".join(map(" | ".join, lines))
    assert code == 0 and {line[0] for line in lines} == {"machine", "claims", "grid", "large", "planner", "cost"}, table
    assert {line[2] for line in lines if line[0] == "claims"} == {"needs a card (stand-in: yes)"}, table


@pytest.mark.slow
def test_what_fails_loses_itself_alone(tmp_path):
    root = tree(tmp_path / "tree")
    path = root / "benchmarks/gpu_stages.py"
    before, _, after = path.read_text().rpartition('if __name__ == "__main__":\n')
    path.write_text(before + PLANTED + after)
    code, lines = rehearse(root, tmp_path / "out", 6)
    failed = [(stage, *found[:2]) for stage, *found in lines if found[1] == "failed"]
    assert code == 1 and failed == [
        *(("machine", "mistake", "failed"), ("claims", "hang", "failed"), ("grid", "crash", "failed")),
        *(("large", "the stage", "failed"), ("planner", "mistake", "failed")),
    ]
    assert [stage for stage, *found in lines if found[0] == "a right one"] == ["machine", "claims", "grid", "planner", "cost"]
    told = {stage: found[2] for stage, *found in lines if found[1] == "failed"}
    assert "no_such_thing" in told["machine"] and "No module named 'no_such_package'" in told["large"]
