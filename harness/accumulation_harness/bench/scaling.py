"""(c) Time over the number of trials, of micro-batches, of parameters, of tensors, and of workers."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from accumulation_harness.bench.cost import Cost, Spread, alternate, of_call, of_command, ratios, seconds
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.bench.startup import TINY
from accumulation_harness.config import OptimizerConfig, Precision, ScheduleConfig
from accumulation_harness.measure.lock_step import REFERENCE, LockStep
from accumulation_harness.recipes.determinism import threads
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.precision import make_scaler
from accumulation_harness.recipes.recipe import Arm, Recipe, make_optimizer, make_schedule, take_step
from accumulation_harness.results.arm_name import ArmName
from accumulation_harness.workloads import Batch, Workload

PART = "scaling"
ROUNDS = 3
TRIALS = (10, 100)
NUMS = (1, 4, 16, 64)
PARAMETERS = (10**4, 10**5, 10**6, 10**7)
TENSORS = (10, 100, 1_000)
WORKERS_TARGET = 1.8
STEPS = 4
SAMPLES = 64
CPU = torch.device("cpu")
# Eight trials of some seconds each: long beside the start-up, which does not get shorter with more workers.
SWEEP = ("seed=range(8)", "algebra_steps=60", "steps=60", "tracking=disabled")


def measurements(rounds: int = ROUNDS) -> Iterator[Measurement]:
    """Ratios of compared to bare steps over N, parameters and tensors; then sweeps over workers and trials."""
    axes: dict[str, dict[str, tuple[Vectors, int]]] = {
        "N": {f"{num}": (wide(10**5), num) for num in NUMS},
        "parameters": {f"{size:.0e}": (wide(size), 2) for size in PARAMETERS},
        "tensors": {f"{num}": (deep(num), 2) for num in TENSORS},
    }
    with threads(1):
        for axis, sizes in axes.items():
            for size, (workload, num) in sizes.items():
                yield over_bare(f"{axis} = {size}", workload, num, rounds)
    yield from over_workers(rounds)
    yield from over_trials(rounds)


def over_bare(name: str, workload: Vectors, num: int, rounds: int) -> Measurement:
    """Lock-step, compared at every step, over the same two arms stepped bare; per step of both arms."""
    lock, bare, ids = LockStep(two_arms(workload, num), seed=0), two_arms(workload, num), torch.arange(SAMPLES)

    def bare_steps() -> None:
        for _ in range(STEPS):
            for arm in bare.values():
                float(take_step(arm, arm.workload.batch(ids)))

    def lock_steps() -> None:
        for _ in range(STEPS):
            lock.step(ids, gradients="compared")

    bare_steps()
    lock_steps()
    costs = alternate({"bare": lambda: of_call(bare_steps), "lock": lambda: of_call(lock_steps)}, rounds)
    wall, cpu = ratios(costs["lock"], costs["bare"])
    note = f"a step of both arms: {seconds(costs['lock'])[0].median / STEPS * 1e3:.3g} ms"
    return Measurement(part=PART, name=f"comparing over bare, {name}", unit="x", wall=wall, cpu=cpu, note=note)


def over_workers(rounds: int) -> Iterator[Measurement]:
    """The same sweep on one core with one worker and on two cores with two."""
    costs = _sweeps({f"{n}": (n, [*SWEEP, f"workers={n}"]) for n in (1, 2)}, rounds)
    wall, cpu = ratios(costs["1"], costs["2"])
    name = "two workers on two cores times faster than one on one"
    yield Measurement(part=PART, name=name, unit="x", wall=wall, cpu=cpu, target=WORKERS_TARGET, at_least=True)


def over_trials(rounds: int) -> Iterator[Measurement]:
    """Tiny trials, all cores; one run of the hundred."""
    for number in TRIALS:
        tiny = [*TINY, "tracking=disabled", f"seed=range({number})"]
        costs = _sweeps({"all": (0, tiny)}, rounds if number < 100 else 1)["all"]
        each = Spread.of([cost.wall / number * 1e3 for cost in costs])
        spent = Spread.of([cost.cpu / number * 1e3 for cost in costs])
        yield Measurement(part=PART, name=f"a tiny trial, in a sweep of {number:,}", unit="ms", wall=each, cpu=spent)


def _sweeps(sides: dict[str, tuple[int, list[str]]], rounds: int) -> dict[str, list[Cost]]:
    with tempfile.TemporaryDirectory() as folder:
        count = itertools.count()

        def sweep(cores: int, settings: list[str]) -> Cost:
            results = Path(folder, f"{next(count)}")
            return of_command(
                [sys.executable, "-m", "accumulation_harness", "run", "-m", *settings, f"results={results}"], cores=cores or None
            )

        return alternate({name: lambda side=side: sweep(*side) for name, side in sides.items()}, rounds)  # type: ignore[misc]


class Vectors(Workload):
    """64 samples of a few numbers, one loss term each: a workload whose cost is its model's."""

    num_samples = SAMPLES

    def __init__(self, make: Callable[[], nn.Module], features: int) -> None:
        self._make = make
        self._inputs = torch.randn(SAMPLES, features, generator=torch.Generator().manual_seed(0))
        self.held_out = self.batch(torch.arange(SAMPLES))

    def make_model(self) -> nn.Module:
        """The model of the measurement, from the same weights every time."""
        torch.manual_seed(0)
        return self._make()

    def batch(self, ids: Tensor) -> Batch:
        """The samples with these ids; a target is its id."""
        return Batch(ids=ids, inputs=self._inputs[ids], targets=ids)

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] mean square of each sample's outputs."""
        return outputs.square().mean(1)

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] ones."""
        return torch.ones_like(batch.ids)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] zeros: there is nothing to get right."""
        return torch.zeros_like(batch.ids)


class Scales(nn.Module):
    """`num` vectors of 16 numbers, each added to its input in turn: many tensors, hardly any arithmetic."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([torch.full((16,), 1e-3) for _ in range(num)])

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, 16] -> [n, 16], the input plus all vectors."""
        for vector in self.vectors:
            inputs = inputs + vector
        return inputs


def wide(size: int) -> Vectors:
    """Two square matrices with `size` parameters together."""
    side = round((size / 2) ** 0.5)
    return Vectors(lambda: nn.Sequential(nn.Linear(side, side, bias=False), nn.ReLU(), nn.Linear(side, side, bias=False)), side)


def deep(num: int) -> Vectors:
    """`num` tensors of 16 parameters."""
    return Vectors(lambda: Scales(num), 16)


def two_arms(workload: Vectors, num: int) -> dict[str, Arm]:
    """The full batch and `num` micro-batches, with plain SGD in float32."""
    return {REFERENCE: make_arm(workload, 1), str(ArmName("accumulated", num)): make_arm(workload, num)}


def make_arm(workload: Vectors, num: int) -> Arm:
    """An arm in float32 with plain SGD that cuts its 64 samples into `num` micro-batches."""
    model = workload.make_model()
    optimizer = make_optimizer(OptimizerConfig(lr=1e-3), model.parameters())
    return Arm(
        recipe=Recipe(accumulation_steps=num, split=Even(SAMPLES // num)),
        workload=workload,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(ScheduleConfig(), optimizer, 1),
        scaler=make_scaler(Precision.float32, CPU, 1.0),
        precision=Precision.float32,
        device=CPU,
        clip_norm=None,
    )
