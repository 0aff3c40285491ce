"""Any training function under `watch`: every optimizer that it makes is watched, with the model that its parameters belong to."""

import gc
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from accumulation_harness.watch import watch


def watched(train, *arguments):
    """The reports of `train(*arguments)`, one for each optimizer."""
    with _watching() as seen:
        train(*arguments)
    return [one.report() for one in seen]


@contextmanager
def _watching():
    seen = []
    original = Optimizer.__init__

    def made(optimizer, *arguments, **options):
        original(optimizer, *arguments, **options)
        if optimizer.param_groups:
            seen.append(watch(_model_of(optimizer), optimizer, tell=None).attach())

    Optimizer.__init__ = made
    try:
        yield seen
    finally:
        Optimizer.__init__ = original
        for one in reversed(seen):
            one.detach()


def _model_of(optimizer):
    """The module with most parameters that has one of the optimizer's; an empty one where there is none."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and any(id(p) in own for p in m.parameters())]
    return max(found, key=lambda m: len(list(m.modules())), default=nn.Module())
