"""Loops drawn at random, watched: no right one is called different."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional

from accumulation_harness.watch import watch
from tests.strategies import fixed, watched_loops

WINDOWS, FEATURES, CLASSES = 4, 12, 7
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def watched(loop):
    """The report of a right loop."""
    torch.manual_seed(loop.seed)
    middle = (nn.Linear(FEATURES, loop.width), nn.Tanh(), nn.Linear(loop.width, loop.width), nn.GELU())
    model = nn.Sequential(*middle, nn.Linear(loop.width, CLASSES))
    optimizer = getattr(torch.optim, loop.optimizer)(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=loop.precision == "float16")

    def loss(model, batch):
        return summed(loop, model(batch[0]), batch[1]), terms(batch[1])

    def window(sizes, hand_over):
        parts = [(torch.randn(size, FEATURES), targets(loop, size)) for size in sizes]
        number = max(1, sum(terms(y) for _, y in parts))
        for x, y in map(hand_over, parts) if loop.replayed else parts:
            with torch.autocast("cpu", dtype=TYPES[loop.precision]) if loop.precision in TYPES else nullcontext():
                part = summed(loop, model(x), y) / number
            scaler.scale(part).backward()
        scaler.unscale_(optimizer)
        if loop.clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=loop.seed % 2 == 0)

    with watch(model, optimizer, tell=None, loss=loss if loop.replayed else None) as seen:
        for number in range(WINDOWS):
            is_short = loop.short and number == WINDOWS - 1
            window(loop.sizes[: len(loop.sizes) // 2 + 1] if is_short else loop.sizes, seen.batch)
    return seen.report()


def targets(loop, size):
    y = torch.randint(0, CLASSES, (size,))
    if loop.loss == "ignored":
        y[torch.rand(size) < 0.4] = -100
        y[0] = 0
    return y


def terms(y):
    return int((y != -100).sum())


def summed(loop, z, y):
    """The loss, summed over its terms."""
    z, hot = z.float(), functional.one_hot(y.clamp(min=0), CLASSES).float()
    match loop.loss:
        case "by_hand":
            return -z.log_softmax(-1)[torch.arange(len(y)), y].sum()
        case "smoothed":
            return functional.cross_entropy(z, y, reduction="sum", label_smoothing=0.1)
        case "binary":
            return functional.binary_cross_entropy_with_logits(z, hot, reduction="sum") / CLASSES
        case "squared":
            return functional.mse_loss(z, hot, reduction="sum") / CLASSES
    return functional.cross_entropy(z, y, reduction="sum")


@pytest.mark.slow
@fixed(150)
@given(watched_loops())
def test_no_right_loop_is_called_different(loop):
    assert watched(loop).verdict != "different"
