"""What cannot be run, and says so before it starts: the checks that a schema of types cannot make."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accumulation_harness.config import (
    ARM_BY_ARM,
    COUPLED,
    EMBEDDED,
    TEXTS,
    ConfigError,
    Data,
    Device,
    Execution,
    LastWindow,
    Model,
    Norm,
    OptimizerName,
    Precision,
    ScheduleName,
    Split,
    Study,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.settings import settings

MOST_WINDOW_SAMPLES = 10**8  # int64 ids of all windows of a trial, which are kept: 0.8 GB
MOST_ARMS = 64  # numbers of accumulation steps of one trial


@dataclass(frozen=True)
class Need:
    """What a study needs of a setting: without it there is nothing that it could measure."""

    name: str  # of the field
    is_met: Callable[[TrialConfig], bool]
    expected: str

    def check(self, config: TrialConfig) -> None:
        """Raise `ConfigError` where it is not met."""
        if not self.is_met(config):
            value = value_of(config, self.name)
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(self.name, shown, f"{self.expected}, with study={config.study}")


_OWN_GRADIENTS = (
    Need("norm", lambda c: c.norm != Norm.batch, "none, group or layer: under BatchNorm a sample has no gradient of its own"),
    Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss in which a sample has a gradient of its own"),
)
MUON = "accumulation_harness.recipes.muon:MuonAndAdam"
_EQUAL_SPLIT = Need("split", lambda c: c.split == Split.even, "even: it speaks of micro-batches of one size b")
_OF_REMEDIES = (
    Need("norm", lambda c: c.norm in (Norm.batch, Norm.as_is), "batch: the remedies are BatchNorm's"),
    Need("execution", lambda c: c.execution != Execution.cuda_graph, "eager or compile: a remedy works inside the forward"),
)

NEEDS: dict[Study, tuple[Need, ...]] = {
    Study.balance_loss: (
        _EQUAL_SPLIT,
        Need("workload.data", lambda c: c.workload.data in (Data.digits, Data.mnist1d), "digits or mnist1d, images"),
        Need("data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: every micro-batch weighs the same"),
    ),
    Study.batch_order: (
        _EQUAL_SPLIT,
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: each half has its own"),
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.custom, "one of ours, whose rate for B / N is known"),
    ),
    Study.critical_batch: (
        _EQUAL_SPLIT,
        Need("steps", lambda c: c.steps >= 8, "8 or more: a branch is an eighth of the training"),
        Need("accumulation_steps", lambda c: max(c.accumulation_steps) > 1, "some N above 1: a smaller batch"),
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: branches begin at all points"),
        Need("schedule.warmup_steps", lambda c: c.schedule.warmup_steps == 0, "0: every branch would warm up again"),
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.custom, "one of ours, whose rate for B / N is known"),
    ),
    Study.rescaling: (
        _EQUAL_SPLIT,
        Need("accumulation_steps", lambda c: len(c.accumulation_steps) == 1 and c.accumulation_steps[0] > 1, "one k above 1"),
        Need("steps", lambda c: c.steps >= 16, "16 or more: a curve has so many points"),
        Need("optimizer.name", lambda c: c.optimizer.name == OptimizerName.adamw, "adamw: what is rescaled are its settings"),
        Need("ema_decay", lambda c: c.ema_decay is not None, "a decay: the averaged weights are looked at"),
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: after the warm-up"),
        Need(
            "schedule.warmup_steps",
            lambda c: (c.schedule.warmup_steps + 1) % c.accumulation_steps[0] == 0,
            "one less than a multiple of k: the large batch warms up over the same samples",
        ),
        Need("data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: all windows are of one size"),
    ),
    Study.muon: (
        _EQUAL_SPLIT,
        Need("optimizer.label", lambda c: c.optimizer.label == MUON.partition(":")[2], f"target={MUON}"),
        Need("precision", lambda c: c.precision != Precision.float16, "one without a loss scale"),
    ),
    Study.remedies: _OF_REMEDIES,
    Study.fine_tuning: _OF_REMEDIES,
    Study.batch_statistics: (
        Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),
    ),
    Study.optimizer_memory: (
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.sgd, "an optimizer that has a memory"),
    ),
    Study.epoch_tail: (
        _EQUAL_SPLIT,
        Need("workload.penalty", lambda c: c.workload.penalty == 0, "0: the loop is written without"),
        Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss that is a mean over samples"),
    ),
    Study.resumption: (Need("steps", lambda c: c.steps >= 3, "3 or more: the third window is interrupted"),),
    Study.gradient_noise: (
        *_OWN_GRADIENTS,
        Need("workload.data", lambda c: c.workload.data != Data.custom, "a workload of ours: it differentiates sample by sample"),
        Need("accumulation_steps", lambda c: c.accumulation_steps[0] > 1, "two or more micro-batches to begin with"),
    ),
    Study.second_moment: (
        *_OWN_GRADIENTS,
        _EQUAL_SPLIT,
        Need("optimizer.name", lambda c: c.optimizer.name in (OptimizerName.adam, OptimizerName.adamw), "adam or adamw"),
    ),
    Study.randomness: (
        Need("execution", lambda c: c.execution != Execution.cuda_graph, "eager or compile: masks of samples come from the host"),
        Need("workload.dropout", lambda c: c.workload.dropout > 0, "a positive probability: there is nothing else that draws"),
    ),
    Study.loss_scaling: (
        Need("precision", lambda c: c.precision == Precision.float16, "float16: the others have no loss scale"),
    ),
    Study.negatives: (
        Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.retrieval: (
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.method_memory: (
        _EQUAL_SPLIT,
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.replicas: (
        Need("device", lambda c: c.device != Device.cuda, "cpu: the ranks are processes with gloo between them"),
    ),
}  # fmt: skip


def value_of(config: Any, name: str) -> Any:
    """The value of the field of that dotted name; None where there is no such field."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def validate(config: TrialConfig) -> None:
    """Raise `ConfigError` at the first setting that cannot be run.

    What depends on the data (a micro-batch of one sample under BatchNorm, say) is checked where the data is known.
    """
    _check_bounds(config)
    _check_targets(config)
    if config.workload.data == Data.custom:
        _check_custom(config)
    else:
        _check_workload(config)
    _check_windows(config)
    if config.optimizer.name == OptimizerName.nesterov and config.optimizer.momentum == 0:
        raise ConfigError("optimizer.momentum", 0, "a positive momentum with nesterov")
    if config.trained_arm is not None and config.study not in ARM_BY_ARM:
        raise ConfigError("trained_arm", config.trained_arm, f"null without study={' or '.join(ARM_BY_ARM)}")
    for need in NEEDS.get(config.study, ()):
        need.check(config)


def _check_bounds(config: TrialConfig) -> None:
    """Every number that there is, against its bounds; `null` is the absence of one."""
    for name, setting in settings().items():
        value = value_of(config, name) if setting.bounds else None  # None of `workers`, which is no setting of a trial
        for number in value if isinstance(value, tuple) else (value,):
            if setting.bounds and number is not None and not setting.bounds.hold(number):
                raise ConfigError(name, number, f"{setting.bounds} ({setting.bounds.why})")


def _check_targets(config: TrialConfig) -> None:
    """A target where the user's own code is asked for, and nowhere else."""
    for name, own, is_custom in (
        ("workload", config.workload, config.workload.data == Data.custom),
        ("optimizer", config.optimizer, config.optimizer.name == OptimizerName.custom),
    ):
        if is_custom:
            place, _, attribute = (own.target or "").rpartition(":")
            if not (place and attribute.isidentifier()):
                raise ConfigError(f"{name}.target", own.target or "null", "FILE.py:NAME or package.module:NAME")
            for key, value in own.args.items():
                if not is_plain(value):
                    raise ConfigError(f"{name}.args.{key}", value, "text, a finite number, true, false, null, or lists of these")
        else:
            for key, value in (("target", own.target), ("args", own.args or None), ("source", own.source)):
                if value is not None:
                    raise ConfigError(f"{name}.{key}", value, f"nothing without {name}=custom")


def is_plain(value: Any) -> bool:
    """Whether a value is one that JSON has, NaN and infinities left out."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _check_custom(config: TrialConfig) -> None:
    """The settings of our own models mean nothing to a task."""
    for name in ("model", "width", "depth", "dropout"):
        if getattr(config.workload, name) != getattr(WorkloadConfig(), name):
            raise ConfigError(
                f"workload.{name}", getattr(config.workload, name), "nothing with workload=custom: use workload.args"
            )
    if config.data.root is not None:
        raise ConfigError("data.root", config.data.root, "null with workload=custom: the task knows where its data are")
    if config.execution == Execution.cuda_graph:
        raise ConfigError("execution", config.execution, "eager or compile with workload=custom")


def _check_workload(config: TrialConfig) -> None:
    workload = config.workload
    scheme, is_address, _ = (config.data.root or "").partition("://")
    if is_address:  # which may hold a password, and settings are stored, logged and shown: not even here
        raise ConfigError("data.root", f"{scheme}://...", "a local folder, never an address")
    if config.norm == Norm.as_is:
        raise ConfigError("norm", config.norm, f"none, batch, group or layer with workload.data={workload.data}")
    if (workload.model == Model.transformer) != (workload.data in TEXTS) or (workload.model == Model.conv1d) != (
        workload.data == Data.mnist1d
    ):
        raise ConfigError("workload.model", workload.model, f"a model for {workload.data} data")
    if workload.data in TEXTS and config.norm not in (Norm.layer, Norm.none):
        raise ConfigError("norm", config.norm, f"layer or none with workload={workload.data}")
    if (workload.model == Model.towers) != (workload.data == Data.docstrings):
        raise ConfigError(
            "workload.model",
            workload.model,
            f"{'towers' if workload.data == Data.docstrings else 'a model'} for {workload.data} data",
        )
    if workload.data == Data.docstrings and config.norm != Norm.none:
        raise ConfigError("norm", config.norm, "none with workload=docstrings")
    if workload.data == Data.pairs and workload.model != Model.mlp:
        raise ConfigError("workload.model", workload.model, "mlp for pairs data: two perceptrons, one for each half")
    if workload.data in EMBEDDED and config.data.root is not None:
        raise ConfigError("data.root", config.data.root, f"null with workload.data={workload.data}, which is embedded")
    if workload.data in (Data.mnist, Data.cifar10) and config.data.root is None:
        raise ConfigError("data.root", "null", f"a local folder that holds {workload.data}")


def _check_windows(config: TrialConfig) -> None:
    batch, chosen = config.effective_batch, config.accumulation_steps
    for name, steps in (("steps", config.steps), ("algebra_steps", config.algebra_steps)):
        if (steps or 0) * batch > MOST_WINDOW_SAMPLES:
            raise ConfigError(name, steps, f"at most {MOST_WINDOW_SAMPLES // batch} with effective_batch={batch}")
    if not 0 < len(chosen) <= MOST_ARMS:
        raise ConfigError("accumulation_steps", list(chosen), f"one to {MOST_ARMS} numbers of micro-batches, an arm each")
    if len(config.faults) > MOST_ARMS:
        raise ConfigError("faults", list(config.faults), f"at most {MOST_ARMS} faults, an arm each for every N")
    if len(set(config.methods)) != len(config.methods) or len(config.methods) > MOST_ARMS:
        raise ConfigError("methods", list(config.methods), f"at most {MOST_ARMS} methods, each once")
    if config.methods and config.workload.data not in (Data.docstrings, Data.pairs, Data.custom):
        raise ConfigError(
            "methods", list(config.methods), f"none with workload.data={config.workload.data}: its loss is separable"
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigError("accumulation_steps", list(chosen), "each number once")
    for num in chosen:
        if num > batch:
            raise ConfigError("accumulation_steps", num, f"at most effective_batch={batch}: b would be below 1")
        if config.split == Split.even and batch % num:
            raise ConfigError("accumulation_steps", num, f"a divisor of effective_batch={batch}, or split=ragged")
