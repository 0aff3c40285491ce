"""The patches of docs/remedies.md as training functions: `trained(cause, "-")` before, `trained(cause, "+")` after the patch."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.remedy import patch

REMAINDER = (Cause.short_window_divided_by_n, Cause.window_misplaced)


class Net(torch.nn.Module):
    """A linear classifier whose forward also takes a batch of accelerate's."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, y=None):
        logits = self.head(x)
        return logits if y is None else SimpleNamespace(loss=functional.cross_entropy(logits, y))


class Average(AveragedModel):
    update = AveragedModel.update_parameters


def rows(cause):
    """Inputs and labels as the fault needs them to show."""
    count = 40 if cause in REMAINDER else 32
    if cause == Cause.replicas_not_synchronised:
        torch.manual_seed(torch.distributed.get_rank())
    x, y = 5 * torch.randn(count, 8), torch.randint(0, 4, (count,))
    if cause == Cause.mean_of_means:
        y[torch.rand(count) < 0.4] = -100
    if cause == Cause.non_finite_micro_batch:
        x[5] = torch.nan
    return x if cause == Cause.foreign_gradients else TensorDataset(x, y)


def trained(cause, mark):
    """One side of the patch of a cause, over two epochs."""
    lines = "".join(line[1:] for line in patch(cause).splitlines(keepends=True) if line[0] in f" {mark}")
    code = compile(lines, f"{cause}{mark}", "exec")

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model, generator, discriminator = Net(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows(cause), batch_size)
        names = {
            "accumulation_steps": accumulation_steps, "gradient_accumulation_steps": accumulation_steps,
            "model": model, "generator": generator, "discriminator": discriminator, "loader": loader, "torch": torch,
            "optimizer": optimizer, "lr": 0.1, "decay": 0.1, "anchor": torch.zeros(4, 8),
            "g_optimizer": torch.optim.SGD(generator.parameters(), lr=0.1),
            "d_optimizer": torch.optim.SGD(discriminator.parameters(), lr=0.1),
            "criterion": functional.cross_entropy, "F": functional, "clip_grad_norm_": clip_grad_norm_,
            "scheduler": ExponentialLR(optimizer, 0.9), "itertools": itertools, "nullcontext": nullcontext,
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1),
            "ema": Average(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        }  # fmt: skip
        if cause == Cause.loss_divided_twice:
            names |= accelerated(names, accumulation_steps)
        if cause == Cause.replicas_not_synchronised:
            names["model"] = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            exec(code, names)

    return train


def unsynchronised(batch_size, accumulation_steps):
    """At the top of a file, where ranks find it."""
    trained(Cause.replicas_not_synchronised, "-")(batch_size, accumulation_steps)


def synchronised(batch_size, accumulation_steps):
    """The same with the remedy."""
    trained(Cause.replicas_not_synchronised, "+")(batch_size, accumulation_steps)


def accelerated(names, accumulation_steps):
    """The same under accelerate, with batches of named tensors."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps, cpu=True)
    model, optimizer = accelerator.prepare(names["model"], names["optimizer"])
    loader = [{"x": x, "y": y} for x, y in names["loader"]]
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer, "loader": loader}
