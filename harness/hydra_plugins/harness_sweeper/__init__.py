"""Hydra sweeper `grids`: a union of cartesian grids, where the basic sweeper has one.

`hydra.sweeper.grids` is a list of mappings from an axis to its values, written as on the command line (`"a,b,c"`).
Without it, this is the basic sweeper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.utils import JobReturn
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode


@dataclass
class GridsSweeperConf:
    """The settings `hydra.sweeper.*`."""

    _target_: str = "hydra_plugins.harness_sweeper.GridsSweeper"
    params: dict[str, Any] | None = None  # axes of every grid, as in the basic sweeper
    grids: list[dict[str, Any]] = field(default_factory=list)
    quick: dict[str, Any] = field(
        default_factory=dict
    )  # axes of the quick grid, which win over the grids as the command line does
    size: str = "full"  # or quick
    experiments: list[str] = field(default_factory=list)  # instead of grids: those of all of these


ConfigStore.instance().store(group="hydra/sweeper", name="grids", node=GridsSweeperConf, provider="harness")

SIZES = ("full", "quick")
MOST_CELLS = 20_000  # of one sweep, all grids together: to compose as many takes half a minute
Grid = dict[str, list[str]]  # axis: its overrides, one per value


class GridsSweeper(BasicSweeper):
    """Every cell of every grid, once, in order.

    The command line wins over the grids. Where some grid lists each of the values it gives for an axis, it restricts: grids keep
    the values they share with it, and a grid of that axis that shares none is left out. Otherwise it replaces the axis in all
    grids (`optimizer=adamw`). A grid that does not name the axis takes the values given.

    The quick grid (`hydra.sweeper.size=quick`) is the grids under the axes of `quick`, as if those were on the command line.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        grids: Sequence[Mapping[str, Any]] = (),
        quick: Mapping[str, Any] | None = None,
        size: str = "full",
        experiments: Sequence[str] = (),
    ) -> None:
        super().__init__(max_batch_size=None, params=_texts(params or {}))
        self.grids = [_texts(grid) for grid in grids]
        self.quick = _texts(quick or {})
        self.size = size
        self.experiments = list(experiments)

    def sweep(self, arguments: list[str]) -> Any:
        """Launch every cell of the grids under the command line's overrides; ConfigCompositionException where none is left."""
        from accumulation_harness.config.compose import Composer
        from accumulation_harness.sweep.experiment import announce_elsewhere
        from hydra_plugins.harness_launcher import ForkserverLauncher

        assert self.config is not None and self.launcher is not None and self.hydra_context is not None
        if self.size not in SIZES:
            raise ConfigCompositionException(f"hydra.sweeper.size={self.size}: expected one of {', '.join(SIZES)}")
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        given = _axes(parser.parse_overrides(arguments))
        grids = [grid for sweeper, own in self._parts(given) for grid in sweeper.restricted(own, parser)]
        if (number := sum(math.prod(map(len, grid.values())) for grid in grids)) > MOST_CELLS:
            raise ConfigCompositionException(f"{' '.join(arguments)}: expected at most {MOST_CELLS} cells, got {number}")
        cells = union(grids)
        if not cells:
            raise ConfigCompositionException(
                f"{' '.join(arguments)}: expected values that one grid of the experiment has together"
            )
        if isinstance(self.launcher, ForkserverLauncher):
            return self.launcher.launch(cells, initial_job_idx=0)
        configs = Composer(loader, self.config).cells(cells)  # the others compose one by one, or on another machine
        announce_elsewhere(configs)
        return collected(configs, self.launcher.launch(cells, initial_job_idx=0))

    def restricted(self, given: Grid, parser: OverridesParser) -> list[Grid]:
        """The grids of the wanted size, under the command line's axes."""
        wanted = self.quick.items() if self.size == "quick" else ()
        quick = _axes(parser.parse_overrides([f"{key}={value}" for key, value in wanted]))
        grids = [
            _axes(parser.parse_overrides([f"{key}={value}" for key, value in (self.params | grid).items()]))
            for grid in self.grids or [{}]
        ]
        return restrict(restrict(grids, quick), given)

    def _parts(self, given: Grid) -> list[tuple["GridsSweeper", Grid]]:
        """This sweeper with the command line's axes; or those of its experiments, each with its own name on the command line."""
        if not self.experiments:
            return [(self, given)]
        assert self.hydra_context is not None
        parts = []
        for name in self.experiments:
            chosen = f"+experiment={name}"
            config = self.hydra_context.config_loader.load_configuration("config", [chosen], run_mode=RunMode.MULTIRUN)
            own = {key: value for key, value in config.hydra.sweeper.items() if key not in ("_target_", "size")}
            parts.append((GridsSweeper(**own, size=self.size), given | {"+experiment": [chosen]}))
        return parts


def collected(configs: Sequence[Any], results: Sequence[JobReturn]) -> Sequence[JobReturn]:
    """What other launchers bring back; raises what a job raised. The sweep ends with the same answer as under our launcher."""
    from accumulation_harness.sweep.child import Failure
    from accumulation_harness.sweep.experiment import TrialsFailed, conclude

    failures: list[Failure] = []
    for result in results:
        try:
            _ = result.return_value
        except TrialsFailed as error:
            failures += error.outcome.failures
    conclude(configs, failures).raise_failures()
    return results


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


def _axes(overrides: Sequence[Override]) -> Grid:
    axes: Grid = {}
    for override in overrides:
        key = override.get_key_element()
        if key.lstrip("+") == "experiment" and (override.is_sweep_override() or isinstance(override.value(), list)):
            raise ConfigCompositionException(f"{override.input_line}: expected one experiment; several take a command each")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise ConfigCompositionException(f"{override.input_line}: expected a list of values or a range to sweep over")
        if not num_values(override) <= MOST_CELLS:
            raise ConfigCompositionException(f"{override.input_line}: expected at most {MOST_CELLS} values to sweep over")
        values = override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
        axes[key] = list(dict.fromkeys(_text(override, key, value) for value in values))
    return axes


def num_values(override: Override) -> float:
    """How many values an override gives, without making them: a range may have any number."""
    match override.value():
        case ChoiceSweep(list=values):
            return len(values)
        case RangeSweep(start=float() | int() as start, stop=float() | int() as stop, step=float() | int() as step):
            return max(0.0, (float(stop) - float(start)) / float(step)) if step else math.inf
        case _:
            return 1


def _text(override: Override, key: str, value: str) -> str:
    """`key=value`, or `~key` for a deletion without a value."""
    return key if override.is_delete() and override.value() is None else f"{key}={value}"


def restrict(grids: Sequence[Grid], given: Grid) -> list[Grid]:
    """The grids under the command line's axes; see `GridsSweeper`."""
    restricting = {
        axis for axis, values in given.items() if set(values) <= {value for grid in grids for value in grid.get(axis, [])}
    }
    restricted = []
    for grid in grids:
        shared = {axis: [v for v in grid[axis] if v in given[axis]] for axis in restricting if axis in grid}
        if all(shared.values()):
            restricted.append(grid | given | shared)
    return restricted


def union(grids: Sequence[Grid]) -> list[list[str]]:
    """The cells of all grids; a cell that several grids hold comes once, where it comes first."""
    cells: dict[frozenset[str], list[str]] = {}
    for grid in grids:
        for cell in product(*grid.values()):
            cells.setdefault(frozenset(cell), list(cell))
    return list(cells.values())
