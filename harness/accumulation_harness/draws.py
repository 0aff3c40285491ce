"""Settings drawn at random over everything that `validate` accepts, at sizes that take about a second.

Beside the schema, because a setting that is not drawn is one in which nobody has looked for a false alarm: every field of
`TrialConfig` is in `DRAWS` or, with the reason, in `LEFT_OUT`; a test compares them with the schema.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from accumulation_harness.config import (
    OUR_OPTIMIZERS,
    ConfigError,
    Data,
    LastWindow,
    Model,
    Norm,
    Precision,
    ScheduleName,
    Split,
    TrialConfig,
)
from accumulation_harness.settings import BOUNDS
from accumulation_harness.validation import validate, value_of

Draw = Callable[[Random], Any]

LEFT_OUT = {
    "experiment": "names the grid",
    "study": "verdicts alone judge an arm",
    "data.root": "the embedded data alone are on every machine",
    "device": "the machine's",
    "arms": "changes no number",
    "execution": "compiling takes half a minute for each trial",
    "workload.data=mnist1d": "20,000 samples and a net of its own, for trainings",
    "workload.data=python_bytes": "as above",
    "workload.model=conv1d": "as above",
    "workload.data=mnist": "files that are not on every machine",
    "workload.data=cifar10": "files that are not on every machine",
    "workload.data=docstrings": "its losses are in-batch ones, which have an experiment of their own",
    "workload.model=towers": "as above",
    "workload.contrast": "as above",
    "workload.hard_negatives": "as above",
    "methods": "as above",
    "workload.model=resnet18": "minutes for each trial",
    "workload.data=custom": "the user's own; so are its target, arguments and source, and those of an optimizer",
    "workload.target": "as above",
    "workload.args": "as above",
    "workload.source": "as above",
    "optimizer.name=custom": "as above",
    "optimizer.target": "as above",
    "optimizer.args": "as above",
    "optimizer.source": "as above",
    "norm=as_is": "as above",
    "trained_arm": "of studies that judge no arm",
    "faults": "right arms are drawn here; `accumulation_harness.recipes.catalogue` has the wrong ones",
}


def one_of(*values: Any) -> Draw:
    """Each as likely; a value that comes twice is twice as likely."""
    return lambda rng: rng.choice(values)


def either(share: float, rare: Draw, usual: Draw) -> Draw:
    """`rare` in this share of the draws."""
    return lambda rng: rare(rng) if rng.random() < share else usual(rng)


def decades(low: float, high: float) -> Draw:
    """10^u with u uniform in [low, high]."""
    return lambda rng: float(f"{10 ** rng.uniform(low, high):.6g}")


def anywhere(name: str) -> Draw:
    """10^u over all that the bounds of a setting allow; from 1e-12 on where they begin at 0."""
    return decades(math.log10(BOUNDS[name].low or 1e-12), math.log10(BOUNDS[name].high))


def rarely_anywhere(name: str, usual: Draw) -> Draw:
    """One draw in twenty over all that the bounds allow: most of it overflows, or does nothing."""
    return either(0.05, anywhere(name), usual)


def share() -> Draw:
    """Uniform in [0, 1), or close to 1, as the decay rates of moving averages are."""
    return either(0.5, lambda rng: round(rng.random(), 4), one_of(0.5, 0.9, 0.95, 0.99, 0.999))


def whole(low: int, high: int) -> Draw:
    """Integers from `low` to `high`, both included."""
    return lambda rng: rng.randint(low, high)


def powers(low: int, high: int) -> Draw:
    """Powers of two from 2^low to 2^high."""
    return lambda rng: 2.0 ** rng.randint(low, high)


def numbers_of_micro_batches(rng: Random) -> tuple[int, ...]:
    """One or two values of N, small ones more often: the time of a trial grows with it."""
    return tuple(sorted({int(2 ** rng.uniform(0, 6 if rng.random() < 0.1 else 4)) for _ in range(rng.randint(1, 2))}))


DRAWS: Mapping[str, Draw] = {
    # text is drawn more often than the others: it goes with one model and two normalisations
    "workload.data": either(0.3, one_of(Data.text), one_of(*(data for data in Data if f"workload.data={data}" not in LEFT_OUT))),
    "workload.model": one_of(Model.conv, Model.mlp, Model.transformer),
    "workload.width": whole(1, 8),
    "workload.depth": whole(1, 3),
    "workload.dropout": either(0.1, one_of(0.1, 0.5, 0.9), one_of(0.0)),
    "workload.penalty": either(0.3, rarely_anywhere("workload.penalty", decades(-6, 1)), one_of(0.0)),
    "data.last_window": one_of(*LastWindow),
    "norm": either(0.1, one_of(Norm.batch), one_of(Norm.none, Norm.group, Norm.layer)),
    "optimizer.name": one_of(*OUR_OPTIMIZERS),
    "optimizer.lr": rarely_anywhere("optimizer.lr", decades(-6, 0)),
    "optimizer.momentum": either(0.1, one_of(0.0), share()),
    "optimizer.beta1": either(0.1, one_of(0.0), share()),
    "optimizer.beta2": either(0.15, one_of(0.0), share()),
    "optimizer.eps": either(0.4, rarely_anywhere("optimizer.eps", decades(-16, 0)), one_of(1e-8)),
    "optimizer.weight_decay": either(0.4, rarely_anywhere("optimizer.weight_decay", decades(-6, 0)), one_of(0.0)),
    "schedule.name": one_of(*ScheduleName),
    "schedule.warmup_steps": either(0.5, whole(0, 20), one_of(0)),
    "clip_norm": either(0.5, rarely_anywhere("clip_norm", decades(-6, 2)), one_of(None)),
    "ema_decay": either(0.3, lambda rng: round(rng.uniform(0.001, 0.999), 4), one_of(None)),
    "precision": one_of(*Precision),
    "loss_scale": rarely_anywhere("loss_scale", either(0.5, decades(0, 5.2), powers(0, 17))),
    "effective_batch": either(0.15, whole(33, 400), whole(2, 32)),  # the large ones meet the end of an epoch
    "accumulation_steps": numbers_of_micro_batches,
    "split": one_of(*Split),
    "steps": whole(1, 6),
    "algebra_steps": either(0.5, one_of(None), either(0.2, whole(21, 80), whole(1, 20))),
    "probe_every": whole(1, 12),
    "referee_every": whole(1, 12),
    "permutations": either(0.05, whole(99, 110), whole(30, 40)),
    "nulls": whole(1, 5),
    "seed": whole(0, 2**31),
}


def drawn(rng: Random, draws: Mapping[str, Draw] = DRAWS) -> TrialConfig:
    """A trial with every setting drawn independently; drawn again until they can be run together."""
    while True:
        values: dict[str, Any] = {}
        for name, draw in draws.items():
            _put(values, name.split("."), draw(rng))
        config: TrialConfig = _built(TrialConfig, values)
        try:
            validate(config)
        except ConfigError:
            continue
        if _fits_the_data(config):
            return config


def overrides(number: int) -> list[str]:
    """The drawn trial of this number, as overrides of the command line: every setting that is drawn, in the table's order."""
    config = drawn(Random(f"drawn {number}"))
    return [f"{name}={_text(value_of(config, name))}" for name in DRAWS]


def _text(value: Any) -> str:
    return "null" if value is None else str(list(value) if isinstance(value, tuple) else value).replace(" ", "")


def _fits_the_data(config: TrialConfig) -> bool:
    """What a trial finds out when it has the data: no micro-batch of one sample where BatchNorm needs two, a loss in each window.

    Said without the data, and so a little too strictly.
    """
    batch, num = config.effective_batch, max(config.accumulation_steps)
    if config.norm == Norm.batch and config.workload.model == Model.mlp:
        return config.data.last_window == LastWindow.drop and batch >= num + num * (num + 1) / 2
    return config.workload.data != Data.ignored_labels or batch >= 16  # a third of the labels are ignored


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _built(kind: Any, values: Mapping[str, Any]) -> Any:
    default = kind()
    nested = {name: _built(type(getattr(default, name)), value) for name, value in values.items() if isinstance(value, dict)}
    return dataclasses.replace(default, **{**values, **nested})
