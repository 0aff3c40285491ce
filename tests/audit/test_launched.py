"""Several ranks: those that another program starts, of which rank 0 judges; and ranks whose evidence is put together."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from accumulation_harness.audit.observe.places import everything
from accumulation_harness.audit.observe.pooling import holders
from accumulation_harness.audit.observe.runs import Functions, Job, Local
from accumulation_harness.audit.request import arms_of
from accumulation_harness.audit.session import judged
from tests.audit.loops import halves, meshes
from tests.commands import ENVIRONMENT, ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]


class OneAfterTheOther(Functions):
    """Ranks that speak to no other, in this process."""

    def __init__(self, ranks, reference, change):
        super().__init__(ranks[0], reference)
        self.ranks = [Local(rank, reference) for rank in ranks]
        self.change = change

    def run(self, job):
        with everything():
            runs = [rank.watched(job, collect=False) for rank in (self.ranks[:1] if job.independent else self.ranks)]
        if job.accumulation_steps > 1 and self.change:
            last = runs[1].tracks[0].steps.pop()
            runs[1].tracks[0].steps.append(replace(last, gradient=self.change(last.gradient)))
        return runs


def audited(*ranks, reference=None, change=None):
    arms = arms_of((1, 4), independent=reference is not None)
    return judged(OneAfterTheOther(ranks, reference, change), arms, 8, 200, frozenset(), None)


def test_parts_of_a_model_are_put_together_in_the_order_of_the_reference():
    report = audited(halves.first_rank, halves.second_rank, reference=halves.whole)
    assert report.equivalent and {result.accumulation_steps for result in report.results} == {1, 4}, str(report)
    assert any("ranks 0 | 1 start from different weights" in line for line in report.hidden)
    tensors = [*report.results[0].facts[0].steps[-1].tensors]
    assert tensors == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.slow
def test_a_fault_of_one_part_is_found():
    report = audited(halves.first_rank, halves.second_rank_not_divided)
    assert report.exit_code == 1
    off = {name for name, seen in report.results[0].facts[0].steps[0].tensors.items() if seen.distance > 1}
    assert off == {"0.weight", "0.bias"}


@pytest.mark.slow
def test_replicas_are_compared_with_each_other():
    report = audited(halves.whole, halves.whole)
    assert report.equivalent and not any("parts of one model" in line for line in report.hidden), str(report)
    apart = audited(halves.whole, halves.whole, change=lambda gradient: gradient * 1.01)
    assert {f.cause for f in apart.findings} == {"replicas_not_synchronised"}


def test_ranks_that_take_the_same_gradient_are_replicas_wherever_they_start():
    def run(train):
        return Local(train, None).watched(Job(batch_size=8, accumulation_steps=1))

    first, second, moved = run(halves.first_rank), run(halves.second_rank), run(halves.first_rank)
    assert holders([first, second]) == [[0], [1]]
    assert holders([first, first, second]) == [[0, 1], [2]]
    step = moved.tracks[0].steps[0]
    moved.tracks[0].steps[0] = replace(step, before=step.before + 1)
    assert holders([first, moved]) == [[0, 1]]


def test_a_rank_that_raises_is_told():
    report = audited(halves.first_rank, halves.second_rank_raises)
    assert (
        report.verdict == "inconclusive"
        and "N=4: the training function raised rank 1: RuntimeError: only here" in report.problems[0]
    )


# -- four real ranks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory):
    """The reports on all functions of `meshes`, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("meshes")
    command = [*TORCHRUN, str(ROOT / "tests/audit/loops/meshes.py"), str(folder), *meshes.RIGHT, *meshes.WRONG]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, env=environment, timeout=1200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*meshes.RIGHT, *meshes.WRONG])
def test_four_ranks(of_four_ranks, name):
    told = json.loads((of_four_ranks / f"{name}.json").read_text())
    causes = meshes.WRONG[name][1] if name in meshes.WRONG else set()
    assert {finding["cause"] for finding in told["findings"]} == causes, told
    assert told["verdict"] == ("different" if causes else "equivalent"), told


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named():
    target = f"{ROOT / 'tests/audit/loops/meshes.py'}:one_rank_killed"
    command = [sys.executable, "-m", "accumulation_harness.audit", target, "--batch-size", "4", "--accumulation-steps", "4"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    of_all = {**os.environ, **ENVIRONMENT, "SLURM_NTASKS": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*command, "--launched"],
            cwd=ROOT,
            env={**of_all, "SLURM_PROCID": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 0, 0, 0], said
    assert "killed by SIGKILL" in said[2][1] and "rank 2: ended without an answer" in " ".join(said[0][0].split())
