"""What `verify` says of a store that is whole, and of every way to damage one that docs/trust.md lists."""

import hashlib
import json
import shutil

import pytest

from accumulation_harness.results import sweeps
from accumulation_harness.results.measurements import FOLDER
from accumulation_harness.results.record import write_record
from accumulation_harness.results.store import LOCKS, Store
from accumulation_harness.sweep import verify
from tests.stored_trials import store_trial


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    for seed in (0, 1):
        store_trial(root, seed=seed)
    data = root.parent / "data.txt"
    data.write_text("one")
    [first, _] = Store(root).trials()
    record = first.record | {"folder": str(root.parent), "files": {"data.txt": hashlib.sha256(b"one").hexdigest()}}
    write_record(first.folder, record)
    (root / FOLDER).mkdir()
    (root / FOLDER / "algebra-1").write_bytes(hashlib.sha256(b"body").digest() + b"body")
    sweeps.announce(root, ["a/b"])
    return root


def edit(path, change):
    path.write_bytes(change(path.read_bytes()))


WAYS = {
    "a number is edited": (
        lambda root, trial: edit(trial / "trial.json", lambda b: b.replace(b"1", b"2", 1)),
        "trial.json: checksum",
    ),
    "rows are lost": (lambda root, trial: edit(trial / "steps.parquet", lambda b: b[:-9]), "steps.parquet: checksum"),
    "rows are deleted": (lambda root, trial: (trial / "steps.parquet").unlink(), "steps.parquet: No such file"),
    "a folder is renamed": (lambda root, trial: trial.rename(trial.with_name("other")), "trial.json: belongs to"),
    "data have changed": (lambda root, trial: (root.parent / "data.txt").write_text("two"), "stale: data.txt has changed"),
    "data are gone": (lambda root, trial: (root.parent / "data.txt").unlink(), "stale: data.txt is gone"),
    "an old failure": (
        lambda root, trial: (trial / "failed.json").write_text("{}"),
        "failed.json is left over from another attempt",
    ),
    "a kill while writing": (
        lambda root, trial: (trial / "trial.json.7.partial").touch(),
        "7.partial is left over from another attempt",
    ),
    "a measurement": (lambda root, trial: edit(root / FOLDER / "algebra-1", lambda b: b[:-1]), "algebra-1: its checksum"),
    "a note": (lambda root, trial: edit(next((root / ".sweeps").glob("*")), lambda b: b"["), "cannot be read (JSONDecodeError"),
    "rows in another form": (lambda root, trial: rewritten(trial), "Parquet file size is 4 bytes"),
    "a trial is linked": (lambda root, trial: linked(trial), "is a link"),
    "a lock is no file": (lambda root, trial: (root / LOCKS / "e" / "t").mkdir(parents=True), ".locks/e/t: expected a file"),
    "a verdict": (lambda root, trial: resigned(trial), "splendid"),
}


def rewritten(folder):
    """No table, with a checksum to match."""
    (folder / "steps.parquet").write_bytes(b"rows")
    record = json.loads((folder / "trial.json").read_text())
    write_record(folder, record | {"steps_sha256": hashlib.sha256(b"rows").hexdigest()})


def linked(folder):
    """Moved elsewhere, and a link in its place."""
    folder.rename(folder.parents[2] / "elsewhere")
    folder.symlink_to(folder.parents[2] / "elsewhere")


def resigned(folder):
    """Edited, with a checksum to match."""
    record = json.loads((folder / "trial.json").read_text())
    record["arms"][0]["verdict"] = "splendid"
    write_record(folder, {name: value for name, value in record.items() if name not in ("sha256", "format", "evidence")})


def test_a_whole_store(whole, capsys):
    assert verify.main(["--results", str(whole)]) == 0
    assert capsys.readouterr().out == "2 trials (2 finished): all is as it should be\n"
    assert verify.main(["--results", str(whole / "none")]) == 2


@pytest.mark.parametrize("way", WAYS)
def test_every_damage_is_told(whole, tmp_path, way, capsys):
    root = tmp_path / whole.name
    shutil.copytree(whole, root)
    shutil.copy(whole.parent / "data.txt", tmp_path)
    [first, _] = Store(root).trials()
    write_record(first.folder, first.record | {"folder": str(tmp_path)})
    act, said = WAYS[way]
    act(root, first.folder)
    assert verify.main(["--results", str(root)]) == 1
    assert said in capsys.readouterr().out
