"""Engines that add up gradients in buffers of their own, with an optimizer that holds other tensors than the model."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accumulation_harness.watch import watch
from scoreboard import data

X, Y = data.images()
FAULTS = {  # what is wrong -> its causes, or how often micro-batches count
    "right": [],
    "not divided": ["loss_not_divided", "mean_of_means"],
    "own means": ["mean_of_means"],
    "clipped inside": [],  # which nobody is told; the sum is not right
    "2 and 3 lost": ["micro_batches_lost"],
}


class Engine:
    """Gradients go to one float32 buffer as soon as a backward has given them; the optimizer steps on float32 copies."""

    def __init__(self, model, *, partition):
        """`partition`: the optimizer holds one flat tensor, as ZeRO does, and not one for each parameter, as Megatron does."""
        self.parameters = list(model.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        self.sums = torch.zeros(sum(self.sizes))
        self.weights = torch.cat([p.detach().float().flatten() for p in self.parameters])
        self.counts = True
        for p, gradient in zip(self.parameters, self.sums.split(self.sizes), strict=True):
            p.main_grad = gradient.view_as(p)
            p.register_post_accumulate_grad_hook(self._add)
        self.held = [self.weights] if partition else list(self.weights.split(self.sizes))
        self.optimizer = torch.optim.Adam(self.held, lr=1e-2)

    def _add(self, p):
        if self.counts:
            p.main_grad += p.grad.float()
        p.grad = None

    def step(self):
        for held, gradient in zip(self.held, self.sums.split([h.numel() for h in self.held]), strict=True):
            held.grad = gradient
        nn.utils.clip_grad_norm_(self.held, 1.0)
        self.optimizer.step()
        self.sums.zero_()
        with torch.no_grad():
            for p, weights in zip(self.parameters, self.weights.split(self.sizes), strict=True):
                p.copy_(weights.view_as(p))


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_sums_that_an_engine_keeps(fault, dtype, partition):
    model = data.model(dtype)
    engine = Engine(model, partition=partition)
    with watch(model, engine.optimizer, gradient=lambda p: p.main_grad, tell=None) as seen:
        for window in data.windows(11, keep=False):
            for number, rows in enumerate(window.split(3), start=1):
                reduction, divisor = {"not divided": ("mean", 1), "own means": ("mean", 4)}.get(fault, ("sum", len(window)))
                engine.counts = fault != "2 and 3 lost" or number not in (2, 3)
                (cross_entropy(model(X[rows].to(dtype)).float(), Y[rows], reduction=reduction) / divisor).backward()
                if fault == "clipped inside":
                    engine.sums *= min(1.0, 0.2 / float(engine.sums.norm()))
            engine.step()
    report = seen.report()
    assert report.causes == tuple(FAULTS[fault])
    assert report.verdict == ("different" if report.causes else "equivalent" if fault == "right" else "inconclusive")
    assert ("1, 0, 0, 1 times" in str(report)) == (fault == "2 and 3 lost")


def engine_of_deepspeed(model, **zero):
    import deepspeed

    from scoreboard import deepspeed_engine

    deepspeed_engine._alone()
    settings = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    engine = {"bf16": {"enabled": True}, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    config = settings | engine | {"zero_allow_untested_optimizer": True}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of DeepSpeed's own
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_of_deepspeed(stage, offload, wrong):
    pytest.importorskip("deepspeed")
    from examples.watched_deepspeed import gradient_of, inner

    engine = engine_of_deepspeed(data.model(), stage=stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {}))
    with watch(engine.module, inner(engine), gradient=gradient_of(engine), tell=None) as seen:
        for window in data.windows(12, keep=False):
            for rows in window.split(3):
                loss = cross_entropy(engine(X[rows].bfloat16()).float(), Y[rows])
                engine.backward(loss / 4 if wrong else loss)
                engine.step()
    report = seen.report()
    assert report.causes == (("loss_divided_twice",) if wrong else ())
    assert report.verdict == ("different" if wrong else "equivalent"), str(report)
