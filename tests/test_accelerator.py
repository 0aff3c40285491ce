"""What is asked of a GPU, on a machine that has none."""

import os
from collections import deque
from pathlib import Path

import pytest
import torch

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe import forwards
from accumulation_harness.config import (
    Device,
    HarnessConfig,
)
from accumulation_harness.observe.fence import Fence
from accumulation_harness.referee import gradients
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import child, experiment
from tests.commands import python

STYLES = {
    "none": "pass",
    "products, old": "b.cuda.matmul.allow_tf32 = True",
    "convolutions, old": "b.cudnn.allow_tf32 = False",
    "products, new": "b.cuda.matmul.fp32_precision = 'tf32'",
    "convolutions, new": "b.cudnn.conv.fp32_precision = 'ieee'",
    "everything, new": "b.fp32_precision = 'tf32'",
    "by name": "torch.set_float32_matmul_precision('high')",
}
SHOW = """
import torch, warnings
from accumulation_harness.recipes.determinism import deterministic
warnings.simplefilter("ignore")
b = torch.backends
def shown():
    def told(read):
        try: return read()
        except RuntimeError: return "refused"
    return [told(read) for read in (lambda: b.cuda.matmul.allow_tf32, lambda: b.cudnn.allow_tf32,
        torch.get_float32_matmul_precision, lambda: b.cuda.matmul.fp32_precision, lambda: b.cudnn.conv.fp32_precision)]
{}
before = shown()
with deterministic():
    inside = shown()
assert shown() == before, (before, shown())
assert inside[-2:] == ["ieee", "ieee"], inside
"""


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_tf32_is_off_inside_however_the_caller_has_set_it(style):
    python("-c", SHOW.format(STYLES[style]))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(experiment, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield


def test_a_worker_for_each_gpu(two_gpus, monkeypatch):
    assert experiment._places(HarnessConfig()) == ["0", "1"]
    assert experiment._places(HarnessConfig(workers=2)) == ["0", "1", "0", "1"]
    assert experiment._places(HarnessConfig(device=Device.cpu, workers=3)) == [None] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7f")
    assert experiment._places(HarnessConfig()) == ["3", "GPU-7f"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert experiment._places(HarnessConfig()) == [None]


class Line:
    """In place of the progress bar."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def what_it_sees(config):
    Path(config.results, f"seen-{config.seed}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"))


@pytest.mark.parametrize(("places", "seen"), [(["0", "GPU-7f"], {"0", "GPU-7f"}), ([None, None], {""})])
def test_the_child_of_a_worker_sees_its_gpu_alone(monkeypatch, tmp_path, places, seen):
    """Children are forked here: what is tested is what reaches them, and a forkserver takes seconds to start."""
    context = child.multiprocessing.get_context("fork")
    monkeypatch.setattr(child.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(child, "start_forkserver", lambda: None)
    store = Store(tmp_path)
    configs = [HarnessConfig(seed=seed, results=str(tmp_path)) for seed in (0, 1)]
    todo = deque(child.Cell(config, store, f"seed{config.seed}") for config in configs)
    pool = experiment._Pool(run=what_it_sees, places=list(places), threads=1, progress=Line(), todo=todo, skipped=0)
    pool.start_children()
    assert {one.gpu for one in pool.children} == set(places)
    assert [one.end() for one in pool.children] == [child.Done(), child.Done()]
    assert {(tmp_path / f"seen-{seed}").read_text() for seed in (0, 1)} == seen


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("tensor", "roundoff"), [(OnCuda(torch.ones(2)), 2**-11), (torch.ones(2), 0.0)])
def test_the_audit_allows_for_tf32_on_a_gpu(tensor, roundoff):
    seen = forwards.Forwards(Run(batch_size=1, accumulation_steps=1), Fence(lambda: None, "the audit"))
    before = seen.run.roundoff
    seen._note_arithmetic((tensor,))
    assert seen.run.roundoff == max(before, roundoff)


def test_a_tall_matrix_is_factorised_by_rows(monkeypatch):
    """The same weights, residual and condition as of the whole matrix; collinear parts too."""
    generator = torch.Generator().manual_seed(0)
    parts = list(torch.randn(3, 1000, dtype=torch.float64, generator=generator))
    rest = torch.randn(1000, dtype=torch.float64, generator=generator)
    # Of collinear columns the last direction is arbitrary, and takes its share of the rest: one in 1000.
    for columns, close in ((parts, 1e-10), ([*parts[:2], parts[0]], 1e-2)):
        a = columns[0] + 0.5 * columns[1] + 0.25 * columns[2] + 0.1 * rest
        whole = gradients.decompose(a, columns)
        with monkeypatch.context() as patch:
            patch.setattr(gradients, "MOST_AT_ONCE", 256)
            by_rows = gradients.decompose(a, columns)
        assert by_rows.weights == pytest.approx(whole.weights, rel=1e-10)
        assert by_rows.residual == pytest.approx(whole.residual, rel=close) and by_rows.residual > 0.01
        assert (by_rows.condition > 1e12) == (whole.condition > 1e12) == (columns is not parts)
