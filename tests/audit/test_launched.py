"""Ranks that another program starts: evidence of each, judged later."""

import gc
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accumulation_harness.audit import merge
from accumulation_harness.audit.__main__ import main
from accumulation_harness.audit.command import judge, parsed
from accumulation_harness.audit.launch import _make, _runs
from accumulation_harness.audit.observe.launched import Launched, Rank, setting_of
from accumulation_harness.audit.observe.pooling import holders
from accumulation_harness.audit.observe.recorded import REFERENCE, Evidence, name_of
from accumulation_harness.audit.request import arms_of
from tests.audit.asked import causes_of
from tests.audit.loops import halves, meshes

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
Train = Callable[..., Any]


class Apart(Launched):
    """A rank without a group: its function speaks to no other."""

    def _join(self):
        if self.functions[True] is not None and not self.rank.number:
            self._write(REFERENCE, self._alone)


def recorded(folder, *ranks, reference=None):
    """The evidence of these ranks, made one after the other in this process."""
    settings = {"batch_size": 8, "accumulation_steps": (1, 4), "max_steps": 200, "replicas": 1}
    setting = setting_of(ranks[0], reference, **settings)  # type: ignore[arg-type]
    gc.freeze()  # what the tests hold need not be looked through in every run
    for number, train in enumerate(ranks):
        with Apart(train, reference, Rank(number, len(ranks), 0), setting, folder) as rank:
            _make(_runs(rank, setting, None), arms_of((1, 4), independent=reference is not None))
            rank.write()
    return folder


def changed(path, **fields):
    evidence = Evidence.read(path)
    replace(evidence, **fields).write(path)


def _change_gradients(path, change):
    """Of the last step of every run that accumulates."""
    evidence = Evidence.read(path)
    for key, run in evidence.runs:
        if key[0] == 4:
            last = run.tracks[0].steps.pop()
            run.tracks[0].steps.append(replace(last, gradient=change(last.gradient)))
    evidence.write(path)


def test_parts_of_a_model_are_put_together_in_the_order_of_the_reference(tmp_path):
    report = merge(recorded(tmp_path, halves.first_rank, halves.second_rank, reference=halves.whole))
    assert report.equivalent and {result.accumulation_steps for result in report.results} == {1, 4}, str(report)
    assert any("ranks 0 | 1 start from different weights" in line for line in report.hidden)
    tensors = [*report.results[0].facts[0].steps[-1].tensors]
    assert tensors == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_fault_of_one_part_is_found(tmp_path):
    report = merge(recorded(tmp_path, halves.first_rank, halves.second_rank_not_divided))
    assert report.exit_code == 1
    off = {name for name, seen in report.results[0].facts[0].steps[0].tensors.items() if seen.distance > 1}
    assert off == {"0.weight", "0.bias"}


def test_replicas_are_compared_with_each_other(tmp_path):
    report = merge(recorded(tmp_path, halves.whole, halves.whole))
    assert report.equivalent and not any("parts of one model" in line for line in report.hidden), str(report)
    _change_gradients(tmp_path / name_of(1, 2), lambda gradient: gradient * 1.01)
    assert {f.cause for f in merge(tmp_path).findings} == {"replicas_not_synchronised"}


def test_what_no_rank_has_looked_into_is_said(tmp_path, evidence):
    shutil.copytree(evidence, tmp_path, dirs_exist_ok=True)
    _change_gradients(tmp_path / name_of(1, 2), np.cos)
    report = merge(tmp_path)
    assert causes_of(report) == {"unexplained"}
    (said,) = [line for line in report.hidden if line.startswith("not looked into: ")]
    assert "its loss taken apart" in said and "operations in double precision" in said


def test_ranks_that_take_the_same_gradient_are_replicas_wherever_they_start(evidence):
    def run(rank):
        return Evidence.read(evidence / name_of(rank, 2)).runs[0][1]

    assert holders([run(0), run(1)]) == [[0], [1]]
    assert holders([run(0), run(0), run(1)]) == [[0, 1], [2]]
    moved, first = run(0), run(0).tracks[0].steps[0]
    moved.tracks[0].steps[0] = replace(first, before=first.before + 1)
    assert holders([run(0), moved]) == [[0, 1]]


def test_a_rank_that_raises_is_told(tmp_path):
    report = merge(recorded(tmp_path, halves.first_rank, halves.second_rank_raises))
    assert (
        report.status == "inconclusive"
        and "N=4: the training function raised rank 1: RuntimeError: only here" in report.problems[0]
    )


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("evidence"), halves.first_rank, halves.second_rank)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def _smuggle(path):
    held = Evidence.read(path)
    replace(held, targets=(Path("/"), None)).write(path)  # type: ignore[arg-type] - a class that is no part of evidence


def _other_setting(path):
    changed(path, setting=replace(Evidence.read(path).setting, batch_size=16))


DEEDS: dict[Callable[[Path], object], str] = {
    Path.unlink: "expected the evidence of 2 ranks, got none of rank 1",
    _flip: "got a damaged file",
    lambda path: path.write_bytes(path.read_bytes()[:-100]): "got a damaged file",
    lambda path: path.write_bytes(pickle.dumps(os.system)): "got a file of another kind",
    _smuggle: "got something else (pathlib.",
    _other_setting: "got another one: batch_size is 16 instead of 8",
    lambda path: changed(path, rank=0): "expected the evidence of one audit, got files of 2 ranks",
    lambda path: changed(path, world=4): "got files of 2 and of 4 ranks",
}


@pytest.mark.parametrize(("deed", "words"), DEEDS.items(), ids=range(len(DEEDS)))
def test_files_that_are_not_the_evidence_of_one_audit_are_refused(tmp_path, evidence, deed, words):
    shutil.copytree(evidence, tmp_path, dirs_exist_ok=True)
    deed(tmp_path / name_of(1, 2))
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        merge(tmp_path)
    assert "\n" not in str(refused.value)


def test_the_command_judges_evidence(evidence, tmp_path, capfd):
    assert main(["merge", str(evidence), "--format", "json", "--report", str(tmp_path / "issue.md")]) == 0
    assert json.loads(capfd.readouterr().out)["status"] == "equivalent"
    issue = (tmp_path / "issue.md").read_text()
    assert "torchrun --nproc-per-node 2 -m accumulation_harness.audit" in issue and f"merge {evidence}" in issue
    code, said, error = judge(parsed(["merge", str(tmp_path), "--format", "json"]))
    assert code == 2 and json.loads(said)["status"] == "inconclusive"
    assert "expected a folder with the evidence of all ranks" in error


def test_outside_of_a_launcher_no_evidence_is_written(tmp_path, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="expected to be started by torchrun"):
        Rank.of_environment()
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert Rank.of_environment() == Rank(3, 8, 1)


# -- four real ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory):
    """The evidence of all functions of `meshes`, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("meshes")
    command = [*TORCHRUN, str(ROOT / "tests/audit/loops/meshes.py"), str(folder), *meshes.RIGHT, *meshes.WRONG]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/harness", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*meshes.RIGHT, *meshes.WRONG])
def test_four_ranks(of_four_ranks, name):
    report = merge(of_four_ranks / name)
    causes = meshes.WRONG[name][1] if name in meshes.WRONG else set()
    assert causes_of(report) == causes, str(report)
    assert report.exit_code == (1 if causes else 0), str(report)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    target = f"{ROOT / 'tests/audit/loops/meshes.py'}:one_rank_killed"
    command = [sys.executable, "-m", "accumulation_harness.audit", target, "--batch-size", "4", "--accumulation-steps", "4"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    of_all = {**os.environ, "SLURM_NTASKS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, "--evidence", str(tmp_path)],
            cwd=ROOT,
            env={**of_all, "SLURM_PROCID": str(n)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 2, 0], said
    assert "killed by SIGKILL" in said[2]
    with pytest.raises(ValueError, match="expected the evidence of 4 ranks, got none of rank 2"):
        merge(tmp_path)
