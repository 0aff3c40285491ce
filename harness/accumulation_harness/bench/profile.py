"""(f) Where the time of a trial goes: processor time by phase and by module of the harness, of whole trials as a sweep runs them.

A timer interrupts the trial once per millisecond of processor time. What has passed since the last interrupt is credited to the
phase that the trial is in and to the innermost module of the harness on the stack; nothing is wrapped, so nothing that is called
often looks dearer than it is. A hook that a backward calls may have a part of that backward's own time.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from typing_extensions import Self

from accumulation_harness.bench.cost import Spread
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.bench.overhead import named, run_whole
from accumulation_harness.config import TrialConfig
from accumulation_harness.recipes.determinism import threads

PART = "profile"
ROUNDS = 1  # shares scatter by a percent or two
INTERVAL = 1e-3
SMALLEST = 0.5  # percent; what takes less is summed up
PHASES = {
    ("accumulation_harness.measure.algebra", "measure"): "L0",
    ("accumulation_harness.measure.rounding", "measure"): "L1",
    ("accumulation_harness.measure.poison", "measure"): "poison",
    ("accumulation_harness.measure.training", "train"): "training",
}
# Inside the loop that is trained: which of its lines is at work.
LINES = {("torch._tensor", "backward"): "backward", ("torch.nn.modules.module", "_wrapped_call_impl"): "forward"}
Place = tuple[str, str]  # phase, module


def measurements(rounds: int = ROUNDS, configs: Sequence[TrialConfig] = ()) -> Iterator[Measurement]:
    """Percent by place of each of `configs`, or else of the trials of `overhead`."""
    with threads(1):
        for name, config in named(configs).items():
            yield from of_trial(name, config, rounds)


def of_trial(name: str, config: TrialConfig, rounds: int) -> Iterator[Measurement]:
    """Percent of the trial's processor time by place, the largest first; it adds up to 100."""
    taken = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, Sampler() as sampler:
            run_whole(config, Path(folder))
        taken.append(sampler.shares())
    middle = {place: median(shares[place] for shares in taken) for place in set().union(*taken)}
    large = sorted((place for place in middle if middle[place] >= SMALLEST), key=lambda place: -middle[place])
    for phase, module in large:
        yield _share(f"{name}: {phase}: {module}", [shares[phase, module] for shares in taken])
    yield _share(f"{name}: the rest", [100 - sum(shares[place] for place in large) for shares in taken])


def _share(name: str, percent: list[float]) -> Measurement:
    return Measurement(part=PART, name=name, unit="%", wall=Spread.of(percent))


class Sampler:
    """Seconds of processor time by place while it is open, of the main thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[Place, float] = defaultdict(float)

    def __enter__(self) -> Self:
        self._handler: Any = signal.signal(signal.SIGPROF, self._interrupt)
        self._last = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._handler)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Python calls it when an operation in C has returned: its caller is the innermost frame, and has all its time."""
        self.seconds[place(frame)] += time.process_time() - self._last
        self._last = time.process_time()

    def shares(self) -> defaultdict[Place, float]:
        """Percent of the processor time by place; they add up to 100."""
        total = sum(self.seconds.values())
        return defaultdict(float, {key: 100 * seconds / total for key, seconds in self.seconds.items()})


def place(frame: FrameType | None) -> Place:
    """(phase, module) of a stack. Models and losses count for whoever calls them; the loop's own lines are told apart."""
    phase, module, line = "other", "", ""
    while frame is not None:
        name, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if not module:
            line = LINES.get((name, function), line)
            if name.startswith("torch.optim"):
                line = "optimizer"
            if name.startswith("accumulation_harness.") and not name.startswith(
                ("accumulation_harness.workloads", "accumulation_harness.bench")
            ):
                module = name.rpartition(".")[2]
        phase = PHASES.get((name, function), phase)
        frame = frame.f_back
    return phase, f"{module}, {line}" if module == "recipe" and line else module or "outside the harness"
