"""How long the trainings of a seed take, told by their first steps."""

from __future__ import annotations

import dataclasses
import time

from accumulation_harness.config import ScheduleConfig, TrialConfig

STEPS = 5  # that are taken, with a look at the losses after each
LOOKS = 50  # of a whole training


def seconds(config: TrialConfig) -> float:
    """Estimate the time of one seed: its steps, its looks at the losses, and what is done once.

    Args:
        config: The trial.

    Returns:
        Seconds on one thread.
    """
    from accumulation_harness.measure import studies
    from accumulation_harness.recipes.determinism import threads

    def taken(steps: int) -> tuple[float, float]:
        """Inside steps, and outside."""
        short, started = dataclasses.replace(config, steps=steps, schedule=ScheduleConfig()), time.perf_counter()
        inside = sum(row["curve_seconds"][-1] for row in studies.run(short, lambda *_: None)["measurements"])
        return inside, time.perf_counter() - started - inside

    with threads(1):
        (_, once), (inside, outside) = taken(1), taken(1 + STEPS)
    return inside / (1 + STEPS) * config.steps + once + max(0.0, outside - once) / STEPS * min(LOOKS, config.steps)
