"""Before a card: the stages of `make gpu` start and end on a stand-in, what fails loses no other, and the page is made."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADINGS = (
    "Questions that only",
    "The main grid",
    "Throughput and memory",
    "125 million",
    "The cost of measuring",
    "The machine",
)
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
    """The checkout, with pages and benchmarks that may be changed."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("benchmarks", "docs"):
            shutil.copytree(path, folder / path.name)
        elif path.name in ("README.md", "mkdocs.yml"):
            shutil.copy(path, folder)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def rehearse(root, out, minutes):
    command = [sys.executable, root / "benchmarks/gpu.py", "--device", "cpu", "--minutes", str(minutes), "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    with tarfile.open(out / "gpu.tar.gz") as archive:
        archive.extractall(out, filter="data")
    assert (out / "gpu.tar.gz").stat().st_size < 16 * 2**20 and (out / "table.md").read_text() in done.stdout, done.stderr
    lines = [line[2:-2].split(" | ") for line in (out / "table.md").read_text().splitlines()[2:]]
    return done.returncode, lines


def page(root, archive, *more):
    command = [sys.executable, root / "benchmarks/gpu_page.py", archive, "--root", root, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    target, *left = done.stdout.splitlines()
    return Path(target), left


@pytest.mark.slow
def test_every_stage_starts_and_ends_and_the_page_is_made(tmp_path):
    """Eight minutes are the most that it may take: on two idle cores it takes two."""
    root, out = tree(tmp_path / "tree"), tmp_path / "out"
    code, lines = rehearse(root, out, 8)
    table = "\n".join(map(" | ".join, lines))
    assert code == 0 and {line[0] for line in lines} == {"machine", "claims", "grid", "large", "planner", "cost"}, table
    assert {line[2] for line in lines if line[0] == "claims"} == {"needs a card (stand-in: yes)"}, table
    target, left = page(root, out / "gpu.tar.gz", "--commit", "0" * 40)
    written = target.read_text()
    assert target.parent == out and left == [] and [one for one in HEADINGS if one not in written] == []
    # As if it had been a card: README and the documentation say so, once.
    rows = [json.loads(line) | {"is_card": True} for line in (out / "gpu/rows.jsonl").read_text().splitlines()]
    rows = [row | ({"device": "NVIDIA H100"} if "device" in row else {}) for row in rows]
    (out / "gpu/rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with tarfile.open(out / "card.tar.gz", "w:gz") as archive:
        archive.add(out / "gpu/rows.jsonl", arcname="gpu/rows.jsonl")
    for _ in range(2):
        target, left = page(root, out / "card.tar.gz", "--commit", "0" * 40)
        assert target.parent == root / "docs/findings/gpu" and left == []
    texts = [(root / name).read_text() for name in ("README.md", "docs/performance.md", "docs/gpu.md", "mkdocs.yml")]
    assert [text.count(target.name) for text in texts] == [1] * 4 and not any("on a GPU yet" in text for text in texts)


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


def test_the_sentences_that_a_card_changes_are_there(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_page

    assert {name: (ROOT / name).read_text().count(before) for name, (before, _) in gpu_page.SENTENCES.items()} == dict.fromkeys(
        gpu_page.SENTENCES, 1
    )
