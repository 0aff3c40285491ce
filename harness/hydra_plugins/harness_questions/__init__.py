"""Hydra's source of the group `experiment`: the grid of each question, and sweeps of several (`conf/config.yaml` names it)."""

from __future__ import annotations

from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

GROUP = "experiment"


class QuestionsSource(ConfigSource):
    """`experiment/NAME` is `experiments/NAME/grid.yaml`; `all` and `core` are one sweep of the grids of all, or of the core."""

    @staticmethod
    def scheme() -> str:
        return "questions"

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group != GROUP or name not in _grids():
            raise ConfigLoadError(f"Config not found : {config_path}")
        match _grids()[name]:
            case Path() as path:
                config = OmegaConf.load(path)
            case names:
                sweep = {"mode": "MULTIRUN", "sweeper": {"experiments": names}}
                config = OmegaConf.create({"experiment": name, "hydra": sweep})
        return ConfigResult(self.provider, f"{self.scheme()}://", config, header={"package": "_global_"})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return group == GROUP and name in _grids()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == GROUP:
            return [] if results_filter == ObjectType.GROUP else sorted(_grids())
        return [GROUP] if config_path == "" and results_filter != ObjectType.CONFIG else []


def _grids() -> dict[str, Path | list[str]]:
    from accumulation_harness.config.questions import grids, questions  # not where another program of Hydra's looks for plugins

    core = [name for name, one in questions().items() if one.core]
    return {**grids(), "all": [*grids()], "core": [name for name in grids() if name in core]}
