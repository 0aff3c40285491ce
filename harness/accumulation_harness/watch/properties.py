"""What a model has that accumulation cannot make equal, or that a window cannot be compared through: told, not blamed."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from accumulation_harness.judge.cause import MEANINGS, Cause


def properties(model: nn.Module, *, draws: bool = False) -> dict[Cause, str]:
    """Cause -> a sentence with the layers that have it; `draws`: whether a forward has drawn random numbers."""
    norms = [name for name, layer in model.named_modules() if _normalises(layer) and layer.training]
    drops = [name for name, layer in model.named_modules() if _drops(layer)]
    drops = drops or ["its forward draws random numbers"] * draws
    found = {}
    for cause, names in ((Cause.batch_statistics, norms), (Cause.stochastic_layers, drops)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found[cause] = f"a property of the model ({names[0] or type(model).__name__}{more}): {MEANINGS[cause].sentence}"
    return found


def _normalises(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)


def _drops(layer: nn.Module) -> bool:
    probability = getattr(layer, "p", 0) if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0)
    return layer.training and isinstance(probability, (int, float)) and 0 < probability < 1
