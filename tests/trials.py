"""Trials as tests ask for them: settings as on a command line, and what is said of every arm."""

import functools

from omegaconf import DictConfig, OmegaConf

from accumulation_harness.config import TrialConfig, to_dict
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.compose import _made
from accumulation_harness.config.identity import identity
from accumulation_harness.measure import studies
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import run_trial
from accumulation_harness.results.store import Store
from tests.toy import CPU


@functools.lru_cache(1)  # most tests begin with the defaults
def _schema(base):
    schema = OmegaConf.structured(base)
    for node in (schema, *(schema[key] for key in schema if isinstance(schema[key], DictConfig))):
        OmegaConf.set_readonly(node, None)
    return schema


def trial(*told, base=TrialConfig):
    """The trial of settings as on a command line, between blanks; later ones win."""
    settings = OmegaConf.from_dotlist(" ".join(told).split())
    return _made(OmegaConf.to_container(OmegaConf.merge(_schema(base), settings))).trial


def setting_of(config):
    """Data, initial weights and windows, on the CPU."""
    return Setting(config, CPU)


def measured(config):
    """The rows that a study gives."""
    return studies.run(config, lambda step, rows: None)["measurements"]


def stored(results, config):
    """The record of a trial that is run and stored, with its step rows."""
    with Store(results).open_trial(config.experiment, identity(config), to_dict(config)) as writer:
        record = studies.run(config, lambda step, rows: [writer.add(row) for row in rows])
        writer.finish(record)
    return record


def arms(config, candidates=None):
    """What is said of each arm, by its name."""
    return run_trial(config, lambda step, rows: None, candidates).arms


def by_name(config, candidates=None):
    """The same by the names of the arms, with their N."""
    return {str(ArmName(row["arm"], row["accumulation_steps"])): row for row in arms(config, candidates)}
