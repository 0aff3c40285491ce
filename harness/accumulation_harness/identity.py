"""The name of a trial: a hash of the settings that differ from their defaults, so that a new setting leaves every old name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any

from accumulation_harness.config import Arms, Device, TrialConfig, name_of_target, to_dict


def identity(config: TrialConfig) -> str:
    """Name of a trial: what a reader wants to see, then 10 hex digits of the SHA-256 of the settings other than the defaults.

    So a new setting leaves every stored trial its name. Once trials are stored, a default can only be changed to a smaller
    measurement (`algebra_steps`, `nulls`): the trials of before have its name, and more evidence than it asks
    for. `device` is to be resolved beforehand
    (`accumulation_harness.sweep.experiment.resolved`): here `auto` counts as `cpu`.
    """
    device = Device.auto if config.device == Device.cpu else config.device
    workload, optimizer = _moved(config.workload), _moved(config.optimizer)
    same = dataclasses.replace(config, device=device, workload=workload, optimizer=optimizer, arms=Arms.auto)
    return _named(config, differing(same))


def _moved(own: Any) -> Any:
    """Settings whose target is known by its fingerprint: the folder that its file lies in is no part of a trial's identity."""
    return own if own.source is None else dataclasses.replace(own, target=name_of_target(own.target))


def differing(config: Any) -> dict[str, Any]:
    """The settings of a configuration that differ from their defaults, nested, as plain JSON types."""
    kind: Any = type(config)
    return _differing(to_dict(config), _defaults(kind))


@cache
def _defaults(kind: Callable[[], Any]) -> dict[str, Any]:
    return to_dict(kind())


def _differing(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _differing(value, usual[name]) if isinstance(value, dict) and name in usual else value
        for name, value in values.items()
        if name not in usual or value != usual[name]
    }


# What the defaults were while identities were hashes of whole configurations.
FORMER_DEFAULTS = json.loads("""{
 "experiment": "single", "study": "verdicts", "norm": "none", "clip_norm": null, "ema_decay": null, "precision": "float32",
 "loss_scale": 4096.0, "device": "auto", "execution": "eager", "effective_batch": 64, "accumulation_steps": [2, 4, 8, 16],
 "split": "even", "steps": 60, "algebra_steps": 200, "probe_every": 10, "referee_every": 50, "permutations": 30, "nulls": 5,
 "faults": [], "seed": 0, "data": {"root": null, "last_window": "keep"}, "schedule": {"name": "constant", "warmup_steps": 0},
 "workload": {"data": "digits", "model": "conv", "width": 8, "depth": 2, "dropout": 0.0, "penalty": 0.0},
 "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.0}
}""")


def legacy_identity(config: TrialConfig) -> str | None:
    """Name under which older stores hold this trial: the hash of all settings there were. None where a younger setting is used.

    To be looked up only; no trial is stored under it any more.
    """
    changed = differing(config)
    former = _merged(FORMER_DEFAULTS, changed)
    return _named(config, former) if _differing(former, FORMER_DEFAULTS) == changed else None


def _merged(values: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """`values` as far as they are not changed; a change of what they do not have is left out."""
    return {
        name: _merged(value, changed.get(name, {})) if isinstance(value, dict) else changed.get(name, value)
        for name, value in values.items()
    }


def _named(config: TrialConfig, hashed: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:10]
    return f"{config.workload.label}-{config.norm}-{config.optimizer.label}-{config.precision}-seed{config.seed}-{digest}"
