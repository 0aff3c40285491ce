"""What cannot be run, and says so before it starts: the checks that a schema of types cannot make."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from accumulation_harness.config import (
    KINDS,
    ConfigError,
    Data,
    Execution,
    OptimizerName,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.config.questions import studies, value_of
from accumulation_harness.config.settings import settings

MOST_WINDOW_SAMPLES = 10**8  # int64 ids of all windows of a trial, which are kept: 0.8 GB
MOST_ARMS = 64  # numbers of accumulation steps of one trial

SECRET_NAME = re.compile(
    r"passw(or)?d|passphrase|secret|credential|(api|access|private)_?key|^((hf|auth|access|api|wandb)_?)?token$", re.I
)
SECRET = re.compile(r"://[^/@]+:[^/@]+@|^(hf_|sk-|ghp_|github_pat_|AKIA|xox[abp]-)[\w-]{12,}$")


def validate(config: TrialConfig) -> None:
    """Refuse a configuration that cannot be run.

    What depends on the data (a micro-batch of one sample under BatchNorm, say) is checked where the data is known.

    Args:
        config: The settings of a trial.

    Raises:
        ConfigError: It names the first setting that cannot be run, its value, and what was expected.
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
    if config.study not in studies():
        raise ConfigError("study", config.study, f"one of {', '.join(studies())}")
    study = studies()[config.study]
    if config.trained_arm is not None and not study.arm_by_arm:
        alone = " or ".join(name for name, one in studies().items() if one.arm_by_arm)
        raise ConfigError("trained_arm", config.trained_arm, f"null without study={alone}")
    for need in study.needs:
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
                if is_secret(key, value):  # not shown here either
                    expected = "nothing secret: arguments are stored, logged and shown; let the code read it from the environment"
                    raise ConfigError(f"{name}.args.{key}", "...", expected)
                if not is_plain(value):
                    raise ConfigError(f"{name}.args.{key}", value, "text, a finite number, true, false, null, or lists of these")
        else:
            for key, value in (("target", own.target), ("args", own.args or None), ("source", getattr(own, "source", None))):
                if value is not None:
                    raise ConfigError(f"{name}.{key}", value, f"nothing without {name}=custom")


def is_secret(key: str, value: Any) -> bool:
    """Decide whether a text has the name of a password or a key, looks like one, or is an address that has one in it.

    >>> is_secret("api_key", "x"), is_secret("url", "https://me:x@host/"), is_secret("pad_token", "<pad>"), is_secret("n", 3)
    (True, True, False, False)

    Args:
        key: The name of the setting.
        value: Its value; dictionaries and lists are looked into.

    Returns:
        True if it must not be stored.
    """
    if isinstance(value, dict):
        return any(is_secret(*item) for item in value.items())
    if isinstance(value, (list, tuple)):
        return any(is_secret(key, one) for one in value)
    return isinstance(value, str) and bool(SECRET_NAME.search(key) or SECRET.search(value))


def is_plain(value: Any) -> bool:
    """Whether a value is one that JSON has, NaN and infinities left out.

    Args:
        value: Any value.

    Returns:
        True where JSON can hold it.
    """
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
    kind, data = KINDS[workload.data], f"with workload.data={workload.data}"
    if workload.model not in kind.models:
        raise ConfigError("workload.model", workload.model, f"{_listed(kind.models)} {data}")
    if config.norm not in kind.norms:
        raise ConfigError("norm", config.norm, f"{_listed(kind.norms)} {data}")
    if not kind.takes_root and config.data.root is not None:
        raise ConfigError("data.root", config.data.root, f"null {data}, which is embedded")


def _listed(names: Sequence[str]) -> str:
    """`a`, or `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


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
