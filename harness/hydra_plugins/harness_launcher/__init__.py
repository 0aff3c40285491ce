"""Hydra launcher `forkserver`: every trial in a child process of its own, in parallel (sweep/experiment.py).

Hydra imports every installed plugin in every Hydra application: imports of the harness stay inside the methods.
It runs this file before it registers the module, so dataclasses here cannot have postponed annotations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class ForkserverLauncherConf:
    """The launcher has no settings."""

    _target_: str = "hydra_plugins.harness_launcher.ForkserverLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="forkserver", node=ForkserverLauncherConf, provider="harness")


class ForkserverLauncher(Launcher):
    """Composes all cells before the first starts; `TrialsFailed` after the last has ended."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composing the cells needs."""
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a trial for every list of overrides; nothing is returned, because results are in the store."""
        from accumulation_harness.config.compose import Composer
        from accumulation_harness.sweep.experiment import run_many

        run_many(Composer(self._loader, self._config).cells(job_overrides)).raise_failures()
        return []
