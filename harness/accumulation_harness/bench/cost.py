"""Costs of calls and commands, taken alternately, so that a change of the machine's load falls on all sides alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.judge.statistics import median_interval

TICKS = os.sysconf("SC_CLK_TCK")


class CommandFailed(RuntimeError):
    """A measured command ended with an error; the message has the end of its output."""


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, seconds of processor time of all processes together, and the largest process in bytes."""

    wall: float
    cpu: float
    peak: int


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of `n` values, and between which of them the median of many more would lie."""

    median: float
    low: float
    high: float
    n: int
    interval: tuple[float, float]  # 90 % of the median; their range below five values, which is less sure

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        middle = median_interval(values)
        return Spread(middle.estimate, min(values), max(values), len(values), (middle.low, middle.high))


def of_call(call: Callable[[], object]) -> Cost:
    """What a call in this process costs; processor time includes the children it leaves running, as the W&B service."""
    wall, cpu = time.perf_counter(), _own_cpu()
    call()
    return Cost(time.perf_counter() - wall, _own_cpu() - cpu, own_memory("VmHWM"))


def own_memory(name: str) -> int:
    """Bytes of this process as Linux counts them: `VmRSS` what it holds, `VmHWM` the most that it has held.

    `ru_maxrss` would be that of the process that has started it where that is larger.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def of_command(
    command: Sequence[str],
    *,
    cores: int | None = None,
    environment: Mapping[str, str] | None = None,
    accept: Sequence[int] = (0,),
) -> Cost:
    """What a command costs on `cores` cores, with all its descendants, also those that outlive it.

    Raises `CommandFailed` on an exit code that is not in `accept`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report, output = Path(scratch, "report.json"), Path(scratch, "output")
        with open(output, "wb") as file:
            subprocess.run(
                [sys.executable, "-m", "accumulation_harness.bench.command", str(report), str(cores or 0), *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                check=True,
            )
        found = json.loads(report.read_text())
        if found.pop("code") not in accept:
            tail = output.read_text(errors="replace")[-2000:]
            raise CommandFailed(f"{' '.join(command)} failed:\n{tail}")
        return Cost(**found)


def alternate(sides: Mapping[str, Callable[[], Cost]], rounds: int, *, least_seconds: float = 0.0) -> dict[str, list[Cost]]:
    """Every side once per round, in order on even rounds and backwards on odd ones: `rounds`, more while `least_seconds` last."""
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    number, started = 0, time.monotonic()
    while number < rounds or time.monotonic() - started < least_seconds:
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            costs[name].append(sides[name]())
        number += 1
    return costs


def ratios(above: Sequence[Cost], below: Sequence[Cost]) -> tuple[Spread, Spread]:
    """The spreads of (wall, processor time) of `above` over `below`, each ratio taken within a round."""
    pairs = list(zip(above, below, strict=True))
    return Spread.of([a.wall / b.wall for a, b in pairs]), Spread.of([a.cpu / b.cpu for a, b in pairs])


def seconds(costs: Sequence[Cost]) -> tuple[Spread, Spread]:
    """The spreads of (wall, processor time) in seconds."""
    return Spread.of([cost.wall for cost in costs]), Spread.of([cost.cpu for cost in costs])


def _own_cpu() -> float:
    return time.process_time() + sum(map(_cpu_of, _children()))


def _children() -> list[int]:
    try:
        tasks = Path("/proc/self/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # no Linux
        return []


def _cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS  # utime, stime, and those of children it has waited for
