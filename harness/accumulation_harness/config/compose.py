"""From a command line to configurations: Hydra composes, and what it gives becomes frozen, validated dataclasses.

Hydra and OmegaConf stop here. Nothing below imports torch, wandb or pandas: `--help` answers in well under a second.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import msgspec
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from accumulation_harness.config import ConfigError, HarnessConfig
from accumulation_harness.config.settings import expected, meant, settings
from accumulation_harness.config.validation import validate
from accumulation_harness.system.terminal import suggesting


class BadInput(ValueError):
    """Input that cannot be run, told in one line."""


def conf_dir() -> Path:
    """The folder of the YAML files.

    Returns:
        An absolute path inside the package.
    """
    return Path(__file__).resolve().parents[1] / "conf"


def register_schema() -> None:
    """Tell Hydra the fields and types of `HarnessConfig`, so that the YAML files select and override only what there is."""
    schema = OmegaConf.structured(HarnessConfig)
    # OmegaConf makes frozen dataclasses read-only, and then no YAML file or override could be merged into them.
    for node in (schema, *(schema[key] for key in schema if isinstance(schema[key], DictConfig))):
        OmegaConf.set_readonly(node, None)
    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("usual_norm", lambda data: "as_is" if str(data) == "custom" else "none", replace=True)


def to_config(composed: DictConfig) -> HarnessConfig:
    """Turn what Hydra composed into the frozen, validated configuration.

    Args:
        composed: The settings of one trial, with or without Hydra's own.

    Returns:
        The configuration.

    Raises:
        ConfigError: A setting is unknown, out of its bounds, or cannot be run with the others.
    """
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    config = _made({key: value for key, value in values.items() if key != "hydra"})
    if config.name is not None:
        config = dataclasses.replace(config, experiment=config.name)
    validate(config)
    if not config.results:
        raise ConfigError("results", "''", "a folder")
    return config


def _made(values: Mapping[str, Any]) -> HarnessConfig:
    """A configuration. OmegaConf checks types, but not of keys added with `+`, nor of what `${...}` stands for."""
    try:
        config = msgspec.convert(values, HarnessConfig)
    except msgspec.ValidationError as error:
        name = str(error).partition("`$.")[2].rstrip("`").partition("[")[0]
        value = functools.reduce(operator.getitem, name.split("."), values)
        raise ConfigError(name, value, expected(name) or "another value") from None
    for name, value in _unknown(values, config):
        raise ConfigError(name, value, meant(name))
    return config


def _unknown(values: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that are no fields of a configuration, with their values."""
    for key, value in values.items():
        if not hasattr(config, key):
            yield prefix + key, value
        elif dataclasses.is_dataclass(own := getattr(config, key)):
            yield from _unknown(value, own, f"{prefix}{key}.")


def compose_trial(overrides: Sequence[str]) -> HarnessConfig:
    """Compose the trial that settings describe, as the command line does.

    Args:
        overrides: Settings as they are typed: `norm=batch`, `accumulation_steps=[4]`, `+experiment=batchnorm`.

    Returns:
        The validated configuration.

    Raises:
        BadInput: A setting cannot be parsed or run; the message names it, the value and what was expected.
    """
    register_schema()
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return to_config(hydra.compose("config", list(overrides)))
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
        self._parse = functools.cache(OverridesParser.create(config_loader=loader).parse_override)
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
        parsed = {text: self._parse(text) for text in overrides}
        composed: DictConfig = pickle.loads(self._base(tuple(t for t, one in parsed.items() if not self._is_value(one))))
        for override in filter(self._is_value, parsed.values()):
            try:
                OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
            except (ConfigAttributeError, ConfigKeyError) as error:  # both as Hydra would tell them
                raise ConfigCompositionException(f"Could not override '{override.key_or_group}'.") from error
            except OmegaConfBaseException as error:
                raise ConfigCompositionException(f"Error merging override {override.input_line}") from error
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


# Messages ----------------------------------------------------------------------------------------------------------------------


def is_bad_input(error: BaseException) -> bool:
    """Decide whether the input is to blame, and a message suffices, or the program, and a traceback is wanted.

    Args:
        error: What was raised.

    Returns:
        True for an error of the configuration, or one that Hydra stumbled over, as over `optimizer=[1]`.
    """
    if isinstance(error, (BadInput, ConfigError, HydraException, OmegaConfBaseException)):
        return True
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = next((package for package in reversed(packages) if package not in sys.stdlib_module_names), "")
    return isinstance(error, Exception) and raised_in in ("hydra", "omegaconf", "antlr4")


def explain(error: BaseException) -> str:
    """Tell a user in one line what is wrong with the input.

    Args:
        error: An error of which `is_bad_input` is true.

    Returns:
        The setting, the value, what was expected, and the choice that may have been meant.
    """
    return suggesting(_explained(error))


def _explained(error: BaseException) -> str:
    text = " ".join(str(error).split())
    first = next(iter(str(error).strip().splitlines()), "")
    match error:
        case BadInput() | ConfigError():
            return str(error)
        case MissingConfigException(missing_cfg_file=str(path), options=[*options]) if "/" in path:
            group, _, option = path.rpartition("/")
            known = ", ".join(str(name) for name in options)
            is_absent = option.startswith("submitit") and "submitit" not in known
            where = " (pip install 'accumulation-harness[slurm]')" if is_absent else ""
            return f"{group}={option}: expected one of {known}{where}"
        case OverrideParseException():
            name, is_set, value = error.override.partition("=")
            if is_set and value[:1] not in ("[", "{", "'", '"'):  # a text with a sign that means something to Hydra
                return f"{error.override}: expected a text with such signs in quotes, \"{name}='{os.path.expanduser(value)}'\""
            return f"{error.override}: expected key=value ({first})"
        case ConfigCompositionException() if first.startswith("Could not override") and "'hydra." not in first:
            key = first.split("'")[1]
            is_group = ("defaults list" in first and expected(key)) or key == "experiment"
            return f"{key}: expected " + (f"+{key}=NAME; name=NAME gives a sweep of your own a name" if is_group else meant(key))
        case ConfigCompositionException() if first.startswith("Ambiguous value for argument"):
            override = first.split("'")[1]
            name, _, values = override.partition("=")
            as_list = f", or write {name}=[{values}] for a list" if _is_list(name) else ""
            return f"{override}: expected one value; add -m to sweep over several{as_list}"
        case ConfigCompositionException(__cause__=cause) if first.startswith("Error merging override") and cause is not None:
            override = first.removeprefix("Error merging override ")
            name, _, value = override.lstrip("+").partition("=")
            looks = expected(name)
            if _is_list(name) and not value.startswith("["):
                looks = f"{looks}; write {name}=[{value}]"
            return f"{override}: expected {looks}" if looks else f"{override}: {next(iter(str(cause).splitlines()), '')}"
        case ConfigCompositionException(__cause__=OmegaConfBaseException() as cause) if not first:  # a value in a YAML file
            return _explained(cause)
        case OmegaConfBaseException(full_key=str(key)) if key:
            looks = expected(key)
            return f"{key}: expected {looks} ({first})" if looks else f"{key}: {first}"
        case HydraException():
            return text
        case KeyError(args=("COMP_LINE",)):
            return f"{' '.join(sys.argv[1:])}: expected COMP_LINE in the environment, which a shell sets that completes a command"
        case _:
            return f"{' '.join(sys.argv[1:])}: {text}"


def _is_list(name: str) -> bool:
    return name in settings() and isinstance(settings()[name].default, tuple)
