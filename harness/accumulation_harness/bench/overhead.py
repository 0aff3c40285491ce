"""(a) What measuring costs: a trial with its probes, tracking and store against the same arms as bare loops.

One thread, one process, the sides in turn. The *training phase* is what a bare loop also does, with everything that is measured
along it. The *whole trial* adds what no bare loop does: the float64 algebra (L0) over some windows, the rounding (L1)
over K permutations and the outcomes; a fixed cost per trial, so its ratio falls as the training grows.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accumulation_harness.bench.bare import bare_arms
from accumulation_harness.bench.cost import Cost, alternate, of_call, ratios, seconds
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.config import (
    Data,
    Device,
    HarnessConfig,
    Model,
    Norm,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
    to_dict,
)
from accumulation_harness.measure.lock_step import REFERENCE, Setting
from accumulation_harness.measure.training import train
from accumulation_harness.recipes.determinism import choose_device, deterministic, threads
from accumulation_harness.recipes.recipe import Recipe
from accumulation_harness.results.mirror import Mirror
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import experiment
from accumulation_harness.trial import full_batch, null_recipes, standard_candidates

PART = "overhead"
SPARSE, DENSE = 10, 1  # probe_every
TARGETS = {SPARSE: 1.08, DENSE: 1.5}
ROUNDS = 3
SECONDS = 40.0  # a short training is repeated that long: on a shared machine single ratios scatter by 0.1 and more
NAMES = ("digits", "language model", "ResNet-18")


def configuration(name: str, precision: Precision = Precision.float32) -> TrialConfig:
    """A trial of the named workload; on a CPU the ResNet has an eighth of its channels and a smaller window."""
    base = TrialConfig(experiment="bench", precision=precision)
    match name:
        case "digits":
            return dataclasses.replace(base, steps=40)
        case "language model":
            workload = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1)
            return dataclasses.replace(base, workload=workload, norm=Norm.layer, split=Split.ragged, effective_batch=32, steps=40)
        case "ResNet-18" if choose_device(Device.auto).type == "cuda":
            workload = WorkloadConfig(model=Model.resnet18, width=8)
            return dataclasses.replace(base, workload=workload, norm=Norm.group, steps=40)
        case "ResNet-18":
            workload = WorkloadConfig(model=Model.resnet18, width=1)
            smaller = dataclasses.replace(base, effective_batch=16, accumulation_steps=(2, 4), steps=40)
            return dataclasses.replace(smaller, workload=workload, norm=Norm.group)
    raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")


def measurements(rounds: int = ROUNDS, configs: Sequence[TrialConfig] = ()) -> Iterator[Measurement]:
    """Every workload, or each of `configs`, with probes at every tenth step and at every step; then the whole trial."""
    with threads(1):
        for name, config in named(configs).items():
            yield from of_workload(name, config, rounds, SECONDS)


def named(configs: Sequence[TrialConfig]) -> dict[str, TrialConfig]:
    """`configs` by what they train, or else the three that have targets."""
    return {config.workload.label: config for config in configs} or {name: configuration(name) for name in NAMES}


def of_workload(name: str, config: TrialConfig, rounds: int, least_seconds: float = 0.0) -> Iterator[Measurement]:
    """Bare loops in seconds; the training phase at both densities of probes, and the whole trial, as ratios to them."""
    with tempfile.TemporaryDirectory() as folder, deterministic(config.precision):
        setting = Setting(config, choose_device(config.device))
        sides = Sides(setting, Path(folder))
        sides.check()
        costs = alternate(
            {
                "bare": lambda: of_call(sides.bare),
                f"{SPARSE}": lambda: of_call(lambda: sides.training(SPARSE)),
                f"{DENSE}": lambda: of_call(lambda: sides.training(DENSE)),
            },
            rounds,
            least_seconds=least_seconds,
        )
        wholes = alternate({"bare": lambda: of_call(sides.bare), "whole": lambda: of_call(lambda: sides.whole(SPARSE))}, 1)
    size = f"{config.steps} steps of {config.effective_batch} samples, {sides.num_parameters:,} parameters"
    note = f"{len(sides.judged) + len(sides.nulls)} arms, {size}"
    wall, cpu = seconds(costs["bare"])
    yield Measurement(part=PART, name=f"{name}: bare loops", unit="s", wall=wall, cpu=cpu, note=note)
    for every in (SPARSE, DENSE):
        yield _ratio(f"{name}: training phase, probe_every={every}", costs[f"{every}"], costs["bare"], TARGETS[every])
    yield _ratio(f"{name}: whole trial, with L0 and L1", wholes["whole"], wholes["bare"], None)


def _ratio(name: str, above: list[Cost], below: list[Cost], target: float | None) -> Measurement:
    wall, cpu = ratios(above, below)
    return Measurement(part=PART, name=name, unit="x", wall=wall, cpu=cpu, target=target)


class Sides:
    """The two sides of the comparison, on the same setting and windows."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder, self.count = setting, folder, itertools.count()
        config = setting.config
        self.stream = list(setting.windows())
        candidates = {candidate.label: candidate.recipe for candidate in standard_candidates(config)}
        self.judged: Mapping[str, Recipe] = {REFERENCE: full_batch(config), **candidates}
        self.nulls = null_recipes(config)
        self.num_parameters = sum(p.numel() for p in setting.initial.parameters())

    def bare(self) -> dict[str, float]:
        """Train all arms as bare loops; the last losses by label."""
        return bare_arms(self.setting, {**self.judged, **self.nulls}, self.stream)

    def training(self, probe_every: int) -> dict[str, float]:
        """The training phase of a trial, into a store and an offline W&B run; the last losses by label."""
        number, config = next(self.count), dataclasses.replace(self.setting.config, probe_every=probe_every)
        setting = self.setting.under(config)
        with (
            Store(self.folder).open_trial("bench", f"{number}", to_dict(config)) as writer,
            Mirror(HarnessConfig().tracking, config, name=f"{number}", folder=writer.folder) as mirror,
        ):
            on_step = experiment.recorder(writer, mirror)
            _, distances = train(setting, self.judged, self.nulls, self.stream, on_step)
            writer.finish({"arms": [], "environment": {}, "seconds": {}})
            mirror.finish({"arms": []})
        return {label: losses[-1] for label, losses in distances.losses.items()}

    def whole(self, probe_every: int) -> None:
        """A whole trial, into a store of its own."""
        run_whole(dataclasses.replace(self.setting.config, probe_every=probe_every), self.folder / f"whole-{next(self.count)}")

    def check(self) -> None:
        """Both sides train the same arms: their last losses agree to the bit, unless chance decides. It also warms both up."""
        bare, measured = self.bare(), self.training(SPARSE)
        same = {label for label in self.judged if bare[label] == measured[label] or self.setting.config.workload.dropout}
        assert same == set(self.judged), f"bare loops and trial differ in {sorted(set(self.judged) - same)}"


def run_whole(config: TrialConfig, results: Path) -> None:
    """A trial as a sweep runs it, in this process."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TrialConfig)}
    experiment.run_one(HarnessConfig(**values, results=str(results)))
