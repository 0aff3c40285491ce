"""A softmax regression small enough to differentiate by hand, as a workload."""

import torch
import torch.nn.functional as F
from torch import nn

from accumulation_harness.config import OptimizerConfig, Precision, ScheduleConfig
from accumulation_harness.recipes.precision import make_scaler, parameter_dtype
from accumulation_harness.recipes.recipe import Arm, Recipe, make_optimizer, make_schedule
from accumulation_harness.workloads import Batch, Workload

CPU = torch.device("cpu")


class Toy(Workload):
    """24 samples of 5 numbers in 3 classes; sample i has 1 + i % 4 loss terms (its loss counts that often)."""

    num_samples = 24

    def __init__(self, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(24, 5, dtype=torch.float64, generator=generator).to(dtype)
        self.y = torch.randint(3, (24,), generator=generator)
        self.held_out = self.batch(torch.arange(24))

    def make_model(self):
        return nn.Linear(5, 3)

    def batch(self, ids):
        return Batch(ids=ids, inputs=self.x[ids], targets=self.y[ids])

    def losses(self, outputs, batch):
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(wide, batch.targets, reduction="none") * self.num_terms(batch)

    def num_terms(self, batch):
        return 1 + batch.ids % 4

    def correct(self, outputs, batch):
        return outputs.argmax(1) == batch.targets


def make_arm(split, *, optimizer=None, precision=Precision.float64, clip_norm=None, **recipe):
    """An arm on `Toy` whose model starts from the same weights every time."""
    workload = Toy(parameter_dtype(precision))
    torch.manual_seed(0)
    model = workload.make_model().to(parameter_dtype(precision))
    made = make_optimizer(optimizer or OptimizerConfig(), model.parameters())
    return Arm(
        recipe=Recipe(accumulation_steps=len(split(24)), split=split, **recipe),
        workload=workload,
        model=model,
        optimizer=made,
        schedule=make_schedule(ScheduleConfig(), made, 10),
        scaler=make_scaler(precision, CPU, 4096.0),
        precision=precision,
        device=CPU,
        clip_norm=clip_norm,
    )
