"""Settings drawn at random: all of them, all that can be run, and the same from the command line."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from random import Random
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from accumulation_harness import compose as composing
from accumulation_harness.config import TrialConfig
from accumulation_harness.draws import DRAWS, LEFT_OUT, drawn, overrides
from accumulation_harness.identity import identity
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.settings import BOUNDS
from accumulation_harness.trial import check_splits, standard_candidates
from tests.toy import CPU

MANY = 3000


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every setting by its dotted name."""
    if not dataclasses.is_dataclass(value):
        return {path: value}
    own = (leaves(getattr(value, f.name), f"{path}.{f.name}".lstrip(".")) for f in dataclasses.fields(value))
    return {name: leaf for part in own for name, leaf in part.items()}


@pytest.fixture(scope="module")
def many() -> list[dict[str, Any]]:
    return [leaves(drawn(Random(f"test {number}"))) for number in range(MANY)]


def test_every_setting_is_drawn_or_left_out_for_a_reason() -> None:
    left_out = {name for name in LEFT_OUT if "=" not in name}
    assert DRAWS.keys() | left_out == leaves(TrialConfig()).keys()
    assert not DRAWS.keys() & left_out and all(LEFT_OUT.values())


def test_every_value_of_a_choice_comes_or_is_left_out(many: list[dict[str, Any]]) -> None:
    for name in DRAWS:
        kind = type(many[0][name])
        if issubclass(kind, StrEnum):
            seen = {config[name] for config in many}
            assert seen == {value for value in kind if f"{name}={value}" not in LEFT_OUT}, name


def test_numbers_come_from_all_of_their_bounds(many: list[dict[str, Any]]) -> None:
    """Within a few decades of either end, for those of which the whole range is drawn."""
    for name in ("optimizer.lr", "optimizer.eps", "optimizer.weight_decay", "workload.penalty", "clip_norm", "loss_scale"):
        seen = [config[name] for config in many if config[name]]
        assert max(seen) > BOUNDS[name].high * 1e-3, name
        assert min(seen) < max(BOUNDS[name].low, 1e-12) * 1e5, name


def test_some_trials_meet_the_short_window_of_an_epoch(many: list[dict[str, Any]]) -> None:
    """The digits have 1,500 training samples."""
    kept = [config for config in many if config["data.last_window"] == "keep"]
    by_length = [config for config in kept if config["effective_batch"] * (config["algebra_steps"] or 0) > 1500]
    assert len(by_length) > 0.01 * len(many) and sum(config["algebra_steps"] is None for config in kept) > 0.2 * len(many)


def test_a_number_always_draws_the_same_trial() -> None:
    assert identity(drawn(Random(5))) == identity(drawn(Random(5))) != identity(drawn(Random(6)))


def test_what_is_drawn_can_be_run_with_its_data() -> None:
    for number in range(25):
        config = drawn(Random(f"run {number}"))
        setting = Setting(config, CPU)
        check_splits(setting, standard_candidates(config))


def test_the_command_line_makes_the_trial_that_was_drawn() -> None:
    composing.register_schema()
    with initialize_config_dir(str(composing.conf_dir()), version_base="1.3"):
        for number in range(30):
            composed = composing.to_config(compose("config", overrides(number))).trial
            assert identity(composed) == identity(drawn(Random(f"drawn {number}")))
