"""One trial: a full-batch reference and its candidate arms, in lock-step on the same windows from the same weights."""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accumulation_harness.config import ConfigError, Data, Device, Execution, LastWindow, Model, Split, TrialConfig
from accumulation_harness.config.arm_name import ACCUMULATED, NULL, PERMUTED, ULP, ArmName
from accumulation_harness.config.targets import said, where
from accumulation_harness.config.validation import validate
from accumulation_harness.judge.counters import Counter
from accumulation_harness.judge.gates import CONFIRMED
from accumulation_harness.judge.verdict import (
    UNSEEN_ROWS,
    Doubt,
    Evidence,
    Outcome,
    Rounding,
    algebra_failures,
    judge,
    rounding_failures,
)
from accumulation_harness.measure import ablation, algebra, poison, rounding
from accumulation_harness.measure.algebra import AlgebraResult
from accumulation_harness.measure.environment import describe
from accumulation_harness.measure.lock_step import REFERENCE, Setting
from accumulation_harness.measure.training import Distances, OnStep, Row, train
from accumulation_harness.recipes import catalogue, precision
from accumulation_harness.recipes.determinism import choose_device, deterministic, threads
from accumulation_harness.recipes.hand_written import Loop, hand_written
from accumulation_harness.recipes.micro_batch import Even, Ragged, SplitPlan, hash_seed
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.results.judged_arm import VerdictRow, to_stored
from accumulation_harness.results.measurements import Measurement, Measurements
from accumulation_harness.workloads import Batch

ROOT, STANDARD = Path(__file__).parents[1], Path(traceback.__file__).parent.name  # folders of our own code, and of Python's


@dataclass(frozen=True)
class Candidate:
    """One arm to be judged: the name that the tables give it, and the recipe that trains it."""

    arm: str
    recipe: Recipe

    @property
    def name(self) -> ArmName:
        """The arm's name, with the number of its micro-batches."""
        return ArmName(self.arm, self.recipe.accumulation_steps)

    @property
    def label(self) -> str:
        """The text form of `name`, under which measurements know the arm."""
        return str(self.name)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial, in plain JSON types."""

    arms: list[Row]  # one for each candidate: the columns of verdicts.csv, and "evidence", "outcome", "reasons"
    summary: Row  # the outcomes of the large batch and of the controls for rounding, environment, seconds by phase


@dataclass(frozen=True)
class Permuted:
    """Shuffles the rows of a window: the control of every comparison, since it changes rounding and nothing else."""

    seed: int

    def __call__(self, window: Batch, step: int) -> Batch:
        """The window of optimizer step `step` in that step's order."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, step))
        return window.rows(torch.randperm(len(window), generator=generator))


def split_plan(config: TrialConfig, accumulation_steps: int) -> SplitPlan:
    """Return how a window is cut into micro-batches.

    Args:
        config: The trial; `split` says whether micro-batches are equal or ragged.
        accumulation_steps: Their number N.

    Returns:
        A plan that gives the sizes of the N micro-batches of a window.
    """
    if accumulation_steps == 1 or config.split == Split.even:
        return Even(config.effective_batch // accumulation_steps)
    return Ragged(accumulation_steps, config.effective_batch)


def full_batch(config: TrialConfig) -> Recipe:
    """Return the recipe that takes a whole window as one batch.

    Args:
        config: The trial.

    Returns:
        The recipe.
    """
    return accumulated(config, 1)


def accumulated(config: TrialConfig, accumulation_steps: int) -> Recipe:
    """Return the right recipe with N micro-batches.

    Args:
        config: The trial.
        accumulation_steps: N.

    Returns:
        The recipe.
    """
    split = split_plan(config, accumulation_steps)
    return Recipe(accumulation_steps=accumulation_steps, split=split, execution=config.execution)


def reference(config: TrialConfig) -> Recipe:
    """The full batch run op by op, whatever its candidates are: so a compiler or a graph that errs is seen in all of them.

    Args:
        config: The trial.

    Returns:
        A recipe of one micro-batch.
    """
    return dataclasses.replace(full_batch(config), execution=Execution.eager)


def permuted(config: TrialConfig, stream: int) -> Recipe:
    """Return the recipe of the control: the large batch with its rows shuffled.

    Args:
        config: The trial.
        stream: Number of the control; each has its own sequence of orders.

    Returns:
        The recipe.
    """
    return dataclasses.replace(full_batch(config), arrange=Permuted(hash_seed(config.seed, 2, stream)))


def standard_candidates(config: TrialConfig) -> list[Candidate]:
    """Return the candidates of an ordinary trial.

    Args:
        config: The trial.

    Returns:
        A right recipe for every N of the configuration, and the large batch with its rows shuffled (the control).
    """
    right = [Candidate(ACCUMULATED, accumulated(config, num)) for num in config.accumulation_steps]
    return [*right, Candidate(PERMUTED, permuted(config, 0))]


def null_recipes(config: TrialConfig) -> dict[str, Recipe]:
    """The band of L3: permuted full batches, and a full batch that starts from weights moved by one ulp.

    Args:
        config: The trial.

    Returns:
        Label -> recipe.
    """
    nulls = {str(ArmName(NULL, replicate=i)): permuted(config, 1 + i) for i in range(config.nulls)}
    return nulls | {ULP: full_batch(config)}


def with_faults(config: TrialConfig, faults: Mapping[str, Callable[[Recipe], Recipe]]) -> list[Candidate]:
    """Return the standard candidates and, for every N, one candidate per planted fault.

    Args:
        config: The trial.
        faults: By name, a function from the right recipe to a faulty one.

    Returns:
        The candidates; a faulty one has the name of its fault.
    """
    standard = standard_candidates(config)
    right = [candidate.recipe for candidate in standard if candidate.arm == ACCUMULATED]
    return [*standard, *(Candidate(name, apply(recipe)) for name, apply in faults.items() for recipe in right)]


def judge_loop(config: TrialConfig, loop: Loop) -> Row:
    """Judge a training loop of your own beside the large batch, at the first N of the configuration.

    Args:
        config: The trial: data, model, optimizer, precision, batch size.
        loop: Called as `loop(arm, window)` for every window. It has to compute the gradients of the window's micro-batches with
            `arm.model`, step `arm.optimizer` and `arm.schedule` once, and return the loss of the window.
            `recipes/hand_written.py` describes `arm` and `window`.

    Returns:
        A row of `verdicts.csv` as a dict, with `verdict`, `cause` and `reasons`. The verdict is `inconclusive` if the loop
        passed the whole window at once at N > 1.

    Raises:
        ConfigError: The trial cannot be run on this machine or with this data, or the loop raised an exception.
    """
    num, forwards = config.accumulation_steps[0], [0]
    mine = hand_written(loop, accumulation_steps=num, split=split_plan(config, num))
    take = mine.loop
    assert take is not None

    def counted(arm: Arm, window: Batch) -> Tensor:
        loss = take(arm, window)
        forwards.append(len(arm.seen) if arm.knows_rows else 0)
        return loss

    mine = dataclasses.replace(mine, loop=counted)
    row = run_trial(config, lambda step, rows: None, [Candidate("by hand", mine), *standard_candidates(config)]).arms[0]
    if num > 1 and max(forwards) == 1 and row["verdict"] in (Outcome.equivalent, Outcome.degraded):
        return {**row, "verdict": str(Outcome.inconclusive), "reasons": str(Doubt.not_accumulated)}
    return row if num == 1 or max(forwards) else {**row, "reasons": f"{UNSEEN_ROWS}; {row['reasons']}"}


def run_trial(
    config: TrialConfig,
    on_step: OnStep,
    candidates: Sequence[Candidate] | None = None,
    shared: Measurements | None = None,
) -> TrialResult:
    """Train candidates beside the large batch on the same samples, and judge each of them.

    Args:
        config: The trial.
        on_step: Called as `on_step(step, rows)` after each optimizer step, with one row of metrics per arm.
        candidates: What to judge; by default `standard_candidates(config)`.
        shared: Measurements that trials of one store share; by default none are shared.

    Returns:
        A row per candidate with its verdict and evidence, and a summary of the trial.

    Raises:
        ConfigError: The trial cannot be run on this machine or with this data, or code of yours raised an exception.
    """
    validate(config)
    device = choose_device(config.device)
    precision.check_available(config.precision, device)
    if device.type == "cuda":
        config = dataclasses.replace(config, device=Device.cuda)  # of the identity: a trial on a CPU is another one
    chosen = standard_candidates(config) if candidates is None else list(candidates)
    available = torch.get_num_threads()
    clock = Clock()
    with threads(1), deterministic(config.precision, device) as named, _phases_told(config, clock, chosen):
        setting = Setting(config, device)
        torch.set_num_threads(num_threads(setting, available))
        check_splits(setting, chosen)
        return Levels(setting, chosen, on_step, shared or Measurements(), clock).result(named)


@contextmanager
def _phases_told(config: TrialConfig, clock: Clock, chosen: Sequence[Candidate]) -> Iterator[None]:
    """What code of the user's own raises inside becomes a ConfigError that says in which of our phases; our own goes on."""
    owners = {"workload.target": config.workload.target, "optimizer.target": config.optimizer.target}
    owners["loop"] = "by hand" if any(candidate.recipe.loop is not None for candidate in chosen) else None
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        named = [(field, target) for field, target in owners.items() if target is not None]
        if not (named and clock.phase) or Path(frames[-1].filename).is_relative_to(ROOT):
            raise
        own = [frame for frame in frames if not {"site-packages", ROOT.name, STANDARD} & {*Path(frame.filename).parts}]
        files = {Path(target.partition(":")[0]).name: (field, target) for field, target in named}
        field, target = files.get(Path(own[-1].filename).name, named[-1]) if own else named[-1]
        raise ConfigError(field, target, f"code that runs in {clock.phase}; it raised {said(error)}{where(own)}") from error


def num_threads(setting: Setting, available: int) -> int:
    """Return the number of threads for a trial: one for a small model, which is slower on several; all for a large one.

    Args:
        setting: The setting of the trial.
        available: Threads that there are.

    Returns:
        1 or `available`.
    """
    return available if setting.config.workload.model == Model.resnet18 or setting.is_large else 1


def check_splits(setting: Setting, candidates: Sequence[Candidate]) -> None:
    """Refuse a trial whose micro-batches are too small to train on, or whose windows are larger than the data.

    Args:
        setting: The trial's task, initial weights and windows.
        candidates: The arms.

    Raises:
        ConfigError: A micro-batch is too small, or a window larger than the data.
    """
    config, num_samples = setting.config, setting.exact.num_samples
    if config.effective_batch > num_samples:
        raise ConfigError("effective_batch", config.effective_batch, f"at most the {num_samples} training samples")
    smallest = setting.exact.smallest_micro_batch
    remainder = num_samples % config.effective_batch if config.data.last_window == LastWindow.keep else 0
    model = f"model={config.workload.model}" if config.workload.data != Data.custom else f"the model of {config.workload.label}"
    for candidate in candidates:
        for size in filter(None, (config.effective_batch, remainder)):
            if min(candidate.recipe.split(size)) < smallest:
                raise ConfigError(
                    "accumulation_steps",
                    candidate.recipe.accumulation_steps,
                    f"micro-batches of at least {smallest} samples with norm={config.norm} and {model}: "
                    f"a window of {size} has one of {min(candidate.recipe.split(size))} "
                    "(fewer accumulation steps, or data.last_window=drop)",
                )


def check_terms(setting: Setting, stream: Sequence[Tensor]) -> None:
    """Refuse a window without any loss term, whose mean loss would be 0 / 0.

    Args:
        setting: The trial's task, initial weights and windows.
        stream: Numbers of the samples of each window.

    Raises:
        ConfigError: A window has no loss term.
    """
    exact = setting.exact
    has_terms = torch.zeros(exact.num_samples, dtype=torch.bool)
    for ids in torch.cat(list(stream)).unique().split(setting.config.effective_batch):  # each sample once, however many windows
        has_terms[ids] = exact.num_terms(exact.batch(ids)).cpu() > 0
    for t, ids in enumerate(stream):
        if not bool(has_terms[ids].any()):
            expected = f"windows with a loss term each: window {t} has none (more samples in a window, or another seed)"
            raise ConfigError("effective_batch", setting.config.effective_batch, expected)


class Levels:
    """L0, L1, the poisoned window and the training of a trial, each once, in an order that waits for no other trial."""

    def __init__(
        self, setting: Setting, candidates: Sequence[Candidate], on_step: OnStep, shared: Measurements, clock: Clock
    ) -> None:
        config, self.setting, self.on_step, self.clock = setting.config, setting, on_step, clock
        clock.phase = "the first windows, in float64"
        self.chosen = [dataclasses.replace(one, recipe=algebra.settled(setting, one.recipe)) for one in candidates]
        self.recipes = {REFERENCE: reference(config)} | {candidate.label: candidate.recipe for candidate in self.chosen}
        assert len(self.recipes) == len(self.chosen) + 1, "candidates need distinct names"
        standard = standard_candidates(config)
        self.is_ours = self.chosen == standard
        self.shared = shared if self.is_ours else Measurements()  # any other arm may depend on whatever it looks at
        self.right = [REFERENCE, *(one.label for one in self.chosen if one in standard)]
        ours = {ACCUMULATED, PERMUTED, *catalogue.names(config), *config.methods}
        others = setting.exact.moves_state or any(one.arm not in ours for one in self.chosen)
        self.stream = list(setting.windows(max(CONFIRMED, config.steps)))
        self.probed = algebra.windows_of(setting, at_least=config.steps if others else 0)
        check_terms(setting, [*self.stream, *self.probed])

    def result(self, named: Sequence[str]) -> TrialResult:
        """What `run_trial` says; `named`: operations without a deterministic kernel."""
        exact, rounded = self.measured()
        trained = self.training
        self._look_again(trained, _right(exact))
        self.clock.phase = "windows without one factor each"
        arms = [self._row(one, exact[one.label], rounded[one.label]) for one in self.chosen]
        summary = {
            "reference": vars(trained.ends[REFERENCE].outcome),
            "nulls": [vars(trained.ends[label].outcome) for label in trained.null_labels],
            "environment": describe(self.setting.device, named),
            "seconds": self.clock.laps,
            "measured_by": self.shared.used,
        }
        return TrialResult(arms, summary)

    @functools.cached_property
    def training(self) -> Distances:
        """The run in the precision under test."""
        self.clock.lap("other")
        before, self.clock.phase = self.clock.phase, "the training and its evaluation"
        config = self.setting.config

        def told(step: int, rows: list[Row]) -> None:
            phase, self.clock.phase = self.clock.phase, ""  # what raises here is nobody's model or loop
            self.on_step(step, rows)
            self.clock.phase = phase

        last = () if self.is_ours else range(config.steps - CONFIRMED, config.steps)
        trained = train(self.setting, self.recipes, null_recipes(config), self.stream[: config.steps], told, last)
        self.clock.lap("training")
        self.clock.phase = before
        return trained

    def _look_again(self, trained: Distances, right: Collection[str]) -> None:
        """Train again what is right in float64 and left the null band by far: the referee looks at the windows around."""
        self.clock.phase = "the training, where it left the shuffled one"
        for label in right:
            left = trained.left_at(label)
            if left is None:
                continue
            looks = range(max(0, left - 1), min(left + CONFIRMED + 1, self.setting.config.steps))
            recipes = {name: self.recipes[name] for name in (REFERENCE, label)}
            nulls = {ULP: self.recipes[REFERENCE]}
            again = train(self.setting, recipes, nulls, self.stream[: looks.stop], lambda step, rows: None, looks)
            for name, errors in again.errors.items():
                trained.errors[name] = {**errors, **trained.errors[name]}

    def measured(self) -> tuple[dict[str, AlgebraResult], dict[str, Rounding]]:
        """L0, with what was done with the poisoned window, and L1, by label."""
        floor_arm = next(candidate.label for candidate in self.chosen if candidate.arm == PERMUTED)
        level0 = algebra.measurement(self.setting, self.recipes, self.probed, floor_arm, ours=self.is_ours)
        level1 = rounding.measurement(self.setting, self.recipes, self.stream[0])
        self._train_meanwhile(level0)
        self.clock.phase = "the run in float64"
        exact = self.shared.of(level0)
        self.clock.lap("algebra")
        self._train_meanwhile(level1)
        self.clock.phase = "the first window in shuffled orders"
        first = self.shared.of(level1)
        others = [partial(self._rounding_of, ids) for ids in self.stream[1 : 2 * CONFIRMED]]
        rounded = rounding.confirmed(first, _right(exact), self.setting.config.precision, others)
        self.clock.lap("rounding")
        self.clock.phase = "a window with a loss that is not finite"
        looked_at = self.stream[: 2 if self.is_ours else 3]
        windows = self.shared.of(poison.measurement(self.setting, self.recipes, looked_at))
        self.clock.lap("poison")
        beside = {
            label: dataclasses.replace(
                own,
                algebra=dataclasses.replace(own.algebra, poisoned=windows[label].is_measured),
                signature=dataclasses.replace(own.signature, survivors_error=windows[label].survivors),
                counters={**own.counters, **poison.differing(windows, label)},
            )
            for label, own in exact.items()
        }
        return beside, rounded

    def _row(self, candidate: Candidate, exact: AlgebraResult, rounded: Rounding) -> Row:
        """One row of `verdicts.csv`, with the evidence it rests on; a gap is taken apart by factors."""
        trained, label, config = self.training, candidate.label, self.setting.config
        own = trained.ends[label]
        others = len({*own.foreign} - {*exact.foreign})  # in float64 such a window is told by its gradient
        evidence = Evidence(
            precision=config.precision,
            algebra=exact.algebra,
            rounding=rounded,
            trajectory=trained.trajectory(label),
            counters={**exact.counters, **own.counters, **({Counter.windows_with_other_samples: (others, 0)} if others else {})},
            signature=exact.signature,
            narrow=exact.narrow,
            finite=all(map(trained.finite, (REFERENCE, label))),
            overflows=own.overflows,
            full_overflows=trained.ends[REFERENCE].overflows,
            overflows_alone=not any(trained.ends[one].overflows for one in self.right if one != label),
        )
        verdict = judge(evidence)
        if verdict.verdict == Outcome.degraded and rounding_failures(config.precision, rounded):  # in the windows that are tried
            short = [ids for ids in (*self.stream, *self.probed) if len(ids) < config.effective_batch]
            ablated = ablation.attribute(self.setting, candidate.recipe, [self.stream[0], *short[:1]])
            evidence = dataclasses.replace(evidence, ablation=ablated)
            verdict = judge(evidence)
        row = VerdictRow.of(config, candidate.name, max(candidate.recipe.split(config.effective_batch)), evidence, verdict)
        return to_stored(row, verdict.reasons, evidence, own.outcome)

    def _train_meanwhile(self, measurement: Measurement[Any]) -> None:
        """While another trial makes the measurement there is something else to do."""
        if self.shared.is_being_made(measurement):
            _ = self.training

    def _rounding_of(self, ids: Tensor, labels: Collection[str]) -> dict[str, Rounding]:
        """L1 of the arms `labels` in the window `ids`."""
        chosen = {label: recipe for label, recipe in self.recipes.items() if label in labels or label == REFERENCE}
        return self.shared.of(rounding.measurement(self.setting, chosen, ids))


def _right(exact: Mapping[str, AlgebraResult]) -> list[str]:
    """The arms in which L0 finds nothing."""
    return [label for label, own in exact.items() if not (algebra_failures(own.algebra) or own.counters)]


class Clock:
    """Seconds by phase; a lap ends one."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self.phase = "the first look at the task"  # in words, what is being done
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Give the time since the last lap to the phase `name`."""
        now = time.perf_counter()
        self.laps[name] += now - self._last
        self._last = now
