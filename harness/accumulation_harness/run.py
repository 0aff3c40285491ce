"""The command line: Hydra composes, this file turns the result into frozen dataclasses, `experiment.py` runs them.

Hydra and OmegaConf stop here. Nothing below imports torch, wandb or pandas: `--help` answers in well under a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import os
import pickle
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from accumulation_harness import usage
from accumulation_harness.config import ConfigError, HarnessConfig, TrialConfig
from accumulation_harness.results.record import keep_others_out
from accumulation_harness.sweep import experiment
from accumulation_harness.terminal import BAD_INPUT, one_line
from accumulation_harness.validation import validate

# What other programs call a setting of ours.
MEANT = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.lr"),
    **{name: f"optimizer.{name}" for name in ("momentum", "beta1", "beta2", "eps", "weight_decay")},
    **dict.fromkeys(("batch_size", "B", "global_batch_size"), "effective_batch, the samples of one optimizer step"),
    **dict.fromkeys(
        ("micro_batch_size", "micro_batch", "mbs", "per_device_train_batch_size"),
        "accumulation_steps=[N]: a micro-batch has effective_batch / N samples",
    ),
    **dict.fromkeys(("N", "n", "accumulate", "gradient_accumulation_steps", "accumulate_grad_batches"), "accumulation_steps=[N]"),
    **{name: f"workload.{name}, or workload=PRESET for data and model" for name in ("model", "width", "depth", "dropout")},
    "dataset": "workload=PRESET, or workload=custom with workload.target=FILE.py:NAME",
    **dict.fromkeys(("dtype", "amp", "fp16", "bf16"), "precision"),
    **dict.fromkeys(("epochs", "max_steps", "num_steps"), "steps, the number of optimizer steps"),
    **dict.fromkeys(("clip", "max_grad_norm", "grad_clip"), "clip_norm"),
    **dict.fromkeys(("plan", "memory"), "accumulation-harness plan memory=24GB, which finds the N that a memory needs"),
    **dict.fromkeys(("out", "output", "output_dir"), "results"),
    **dict.fromkeys(("wandb", "project"), "tracking=offline, online or disabled, and tracking.project"),
    **dict.fromkeys(("warmup", "warmup_steps", "lr_scheduler"), "schedule=NAME and schedule.warmup_steps"),
}
MOST_FLOAT = 1 << 1023  # an integer below it has a float


class BadInput(ValueError):
    """Input that cannot be run, told in one line."""


def conf_dir() -> Path:
    """The folder of the YAML files."""
    return Path(__file__).resolve().parent / "conf"


def main() -> int:
    """Run the command line of this process and return its exit code: 0 done, 1 failed, 2 bad input, 128 + n for signal n."""
    if (answer := usage.asked(sys.argv[1:], conf_dir())) is not None:
        print(answer)
        return 0
    before = os.environ.get("HYDRA_FULL_ERROR")
    wants_traceback = before == "1"
    # Hydra then hands exceptions on, instead of printing them in its own way and leaving with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[0] = "accumulation-harness run"  # the name in usage messages
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra wants it first
    warnings.filterwarnings("ignore", message="Experimental rerun")
    register_schema()
    keep_others_out()
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(_run_composed)()
    except _Stop as stop:
        error: BaseException = stop.error
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
    else:
        return 0
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ |= {} if before is None else {"HYDRA_FULL_ERROR": before}
    return _report(error, wants_traceback)


def _report(error: BaseException, wants_traceback: bool) -> int:
    """Print what stopped the command, and return the exit code."""
    match error:
        case experiment.TrialsFailed():
            return BAD_INPUT if error.outcome.is_bad_input else 1  # `run_many` has reported every failure
        case experiment.Interrupted():
            print(error, file=sys.stderr)
            return 128 + error.signal
        case KeyboardInterrupt():
            print("Stopped before the first trial.", file=sys.stderr)
            return 130
        case _ if is_bad_input(error) and not wants_traceback:
            print(one_line(explain(error)), file=sys.stderr)
            return BAD_INPUT
        case _:
            raise error


class _Stop(BaseException):
    """Carries an error past Hydra's `run_job`, which would print a line of its own about it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run_composed(composed: DictConfig) -> None:
    """Hydra's task function: one trial, in its own child process."""
    try:
        experiment.run_many([to_config(composed)]).raise_failures()
    except Exception as error:
        if HydraConfig.get().mode == RunMode.RUN:
            raise _Stop(error) from error
        raise  # under hydra/launcher=basic the other trials go on


# Composition -------------------------------------------------------------------------------------------------------------------


def register_schema() -> None:
    """Tell Hydra the fields and types of `HarnessConfig`, so that the YAML files select and override only what there is."""
    schema = OmegaConf.structured(HarnessConfig)
    # OmegaConf makes frozen dataclasses read-only, and then no YAML file or override could be merged into them.
    for node in (schema, *(schema[key] for key in schema if isinstance(schema[key], DictConfig))):
        OmegaConf.set_readonly(node, None)
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("usual_norm", lambda data: "as_is" if str(data) == "custom" else "none", replace=True)


def to_config(composed: DictConfig) -> HarnessConfig:
    """The frozen, validated configuration; ConfigError names a setting that is unknown or cannot be run."""
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    config: HarnessConfig = _build(HarnessConfig, {str(k): v for k, v in values.items() if k != "hydra"}, "")
    if config.name is not None:
        config = dataclasses.replace(config, experiment=config.name)
    validate(config)
    if not config.results:
        raise ConfigError("results", "''", "a folder")
    return config


def _build(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """`kind` from plain values. OmegaConf checks types, but not of keys added with `+`, nor of what `${...}` stands for."""
    fields = _field_types(kind)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(prefix + key, value, _known_names(key, list(fields)))
    return kind(**{key: _convert(fields[key], value, f"{prefix}{key}.") for key, value in values.items()})


def _convert(kind: Any, value: Any, prefix: str) -> Any:
    if _has_fields(kind):
        if not isinstance(value, dict):
            raise ConfigError(prefix[:-1], value, f"settings of {prefix[:-1]}, as in {prefix}key=value")
        return _build(kind, value, prefix)
    if isinstance(value, int) and float in (kind, *typing.get_args(kind)) and abs(value) < MOST_FLOAT:
        value = float(value)
    if not _fits(kind, value):
        raise ConfigError(prefix[:-1], value, _describe_kind(kind) or "another value")
    return tuple(value) if isinstance(value, list) else value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a plain value is of the type of a field."""
    if isinstance(kind, types.UnionType):
        return any(_fits(one, value) for one in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(typing.get_args(kind)[0], one) for one in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _has_fields(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@functools.cache
def _field_types(kind: Hashable) -> dict[str, Any]:
    assert isinstance(kind, type) and dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _known_names(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"a known setting; did you mean {close[0]}?" if close else f"one of {', '.join(known)}"


def compose_trial(overrides: Sequence[str]) -> TrialConfig:
    """The trial that these settings describe, as the command line composes it; BadInput about what cannot be run."""
    register_schema()
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(hydra.compose("config", list(overrides))).trial
    except Exception as error:
        if not is_bad_input(error):
            raise
        raise BadInput(explain(error)) from error


class Composer:
    """Configurations of a sweep's cells.

    Hydra's own composition costs 40 ms or more. Only the choice of groups needs it, and cells share those: each distinct choice
    is composed once, and `key=value` overrides are set on a copy, with the type checks that Hydra's composition makes.
    """

    def __init__(self, loader: ConfigLoader, master: DictConfig) -> None:
        self._loader = loader
        self._master = master
        self._parser = OverridesParser.create(config_loader=loader)
        self._parse = functools.cache(self._parser.parse_override)
        self._is_group = functools.cache(lambda key: bool(loader.get_group_options(key)))
        self._bases: dict[tuple[str, ...], bytes] = {}  # pickled: loading one takes a quarter of the time of a deep copy

    def cells(self, cells: Sequence[Sequence[str]]) -> list[HarnessConfig]:
        """All cells, or BadInput about the first that cannot be run."""
        configs = []
        for number, overrides in enumerate(cells, start=1):
            try:
                configs.append(to_config(self._compose(overrides)))
            except (ConfigError, HydraException, OmegaConfBaseException) as error:
                where = f" (trial {number} of {len(cells)}: {' '.join(overrides)})"
                raise BadInput(explain(error) + (where if len(cells) > 1 else "")) from error
        return configs

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        parsed = [self._parse(text) for text in overrides]
        values = [override for override in parsed if self._is_value(override)]
        others = [text for text, override in zip(overrides, parsed, strict=True) if not self._is_value(override)]
        composed: DictConfig = pickle.loads(self._base(tuple(others)))
        for override in values:
            _set(composed, override)
        return composed

    def _base(self, overrides: tuple[str, ...]) -> bytes:
        if overrides not in self._bases:
            base = self._loader.load_sweep_config(self._master, list(overrides))
            OmegaConf.set_struct(base, False)
            del base["hydra"]  # the larger part by far, and constant in a sweep
            OmegaConf.set_struct(base, True)
            self._bases[overrides] = pickle.dumps(base)
        return self._bases[overrides]

    def _is_value(self, override: Override) -> bool:
        """Whether it sets a known key to a value, which no other override's composition can depend on."""
        return (
            override.type == OverrideType.CHANGE
            and override.package is None
            and not override.is_hydra_override()
            and not self._is_group(override.key_or_group)
        )


def _set(composed: DictConfig, override: Override) -> None:
    """As Hydra sets `key=value` after composition, with its error messages."""
    key = override.key_or_group
    try:
        OmegaConf.update(composed, key, override.value(), merge=True)
    except (ConfigAttributeError, ConfigKeyError) as error:
        raise ConfigCompositionException(f"Could not override '{key}'.") from error
    except OmegaConfBaseException as error:
        raise ConfigCompositionException(f"Error merging override {override.input_line}") from error


# Messages ----------------------------------------------------------------------------------------------------------------------


def is_bad_input(error: BaseException) -> bool:
    """Whether the input is to blame: an error of the configuration, or one that Hydra stumbled over, as over `optimizer=[1]`."""
    if isinstance(error, (BadInput, ConfigError, HydraException, OmegaConfBaseException)):
        return True
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = next((package for package in reversed(packages) if package not in sys.stdlib_module_names), "")
    return isinstance(error, Exception) and raised_in in ("hydra", "omegaconf", "antlr4")


def explain(error: BaseException) -> str:
    """One line for a user: the setting, the value, and what was expected."""
    match error:
        case BadInput() | ConfigError():
            return str(error)
        case MissingConfigException(missing_cfg_file=str(path), options=[*options]) if "/" in path:
            group, _, option = path.rpartition("/")
            known = ", ".join(str(name) for name in options)
            is_absent = option.startswith("submitit") and "submitit" not in known
            return f"{group}={option}: expected one of {known}" + (
                " (pip install 'accumulation-harness[slurm]')" if is_absent else ""
            )
        case OverrideParseException():
            return f"{error.override}: expected key=value ({_first_line(error)})"
        case ConfigCompositionException():
            return _explain_composition(error)
        case OmegaConfBaseException(full_key=str(key)) if key:
            return f"{key}: {expected} ({_first_line(error)})" if (expected := _expected(key)) else f"{key}: {_first_line(error)}"
        case HydraException():
            return " ".join(str(error).split())
        case _:
            return f"{' '.join(sys.argv[1:])}: {' '.join(str(error).split())}"


def _explain_composition(error: ConfigCompositionException) -> str:
    text = _first_line(error)
    cause = error.__cause__
    if text.startswith("Could not override"):
        key = text.split("'")[1]
        if key.startswith("hydra."):
            return text
        if key == "b":
            return (
                "b: expected accumulation_steps=[N], b is effective_batch / N; accumulation-harness plan b=auto finds what fits"
            )
        known_group = key in _field_types(HarnessConfig) and "defaults list" in text
        return f"{key}: expected " + (
            f"+{key}=NAME of a grid; name=NAME gives your own sweep a name"
            if key == "experiment"
            else f"+{key}=NAME"
            if known_group
            else _nearest_setting(key)
        )
    if text.startswith("Ambiguous value for argument"):
        override = text.split("'")[1]
        name, _, values = override.partition("=")
        return f"{override}: expected one value; add -m to sweep over several, or write {name}=[{values}] for a list"
    if text.startswith("Error merging override") and cause is not None:
        override = text.removeprefix("Error merging override ")
        return f"{override}: {_expected(override.partition('=')[0].lstrip('+')) or _first_line(cause)}"
    if not text and isinstance(cause, OmegaConfBaseException):  # a value in a YAML file
        return explain(cause)
    return " ".join(str(error).split())


def _expected(key: str) -> str | None:
    """What a value of the setting `key` looks like; None for a name that is no setting."""
    kind: Any = HarnessConfig
    for part in key.split("."):
        kind = _field_types(kind).get(part) if _has_fields(kind) else None
    described = _describe_kind(kind)
    return described and f"expected {described}"


def _describe_kind(kind: Any) -> str | None:
    if isinstance(kind, types.UnionType):
        return " or ".join(filter(None, map(_describe_kind, typing.get_args(kind))))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    if _has_fields(kind):
        return f"its settings: {', '.join(_field_types(kind))}"
    if typing.get_origin(kind) is tuple:
        return "a list of integers, as in [2,4]" if int in typing.get_args(kind) else "a list of names, as in [all]"
    if typing.get_origin(kind) is dict:
        return "arguments of your own, each as in +workload.args.KEY=VALUE"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}.get(kind)


def _group_or_setting(key: str, is_group: bool) -> str:
    if key == "experiment":
        return "+experiment=NAME of a named grid; name=NAME gives your own sweep a name"
    return f"+{key}=NAME" if is_group else _nearest_setting(key)


def _nearest_setting(key: str) -> str:
    """What a mistyped key may have meant: looked up where its part before the last dot leads."""
    *path, name = key.split(".")
    if key in MEANT:
        return MEANT[key]
    kind: Any = HarnessConfig
    for part in path:
        kind = _field_types(kind).get(part)
        if not _has_fields(kind):
            return _known_names(key, list(_field_types(HarnessConfig)))
    return _known_names(name, list(_field_types(kind)))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
