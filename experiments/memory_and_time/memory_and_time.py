"""What accumulating saves in memory and costs in time: bytes and seconds of a window of B samples, over N."""

from __future__ import annotations

import statistics
import time

from accumulation_harness.config import LastWindow
from accumulation_harness.experiments.shared.measuring import Arm, OnStep, Row, Setting, accumulated, take_step
from accumulation_harness.measure import memory
from accumulation_harness.system import accelerator


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure bytes of one step, then seconds of windows.

    Every N takes the `steps` windows in turn, so that a busy machine hits all alike: medians.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per N, N = 1 (the full batch) among them.
    """
    config = setting.config
    first, *timed = setting.windows(1 + config.steps, last=LastWindow.drop)

    def make_arm(num: int) -> Arm:
        return setting.arm(accumulated(config, num), steps=2 + len(timed))

    def weigh(arm: Arm) -> memory.Memory:
        take_step(arm, arm.workload.batch(first))  # allocates the state
        return memory.of_step(arm, arm.workload.batch(first))

    nums = (1, *config.accumulation_steps)
    weighed = {num: weigh(make_arm(num)) for num in nums}  # one arm at a time: an allocator's peak has all that lives
    arms = {num: make_arm(num) for num in nums}
    for arm in arms.values():
        take_step(arm, arm.workload.batch(first))
    seconds: dict[int, list[float]] = {num: [] for num in arms}
    for ids in timed:
        for num, arm in arms.items():
            window = arm.workload.batch(ids)
            if setting.device.type != "cpu":
                accelerator.module(setting.device).synchronize()  # the window's own copies are none of the step
            started = time.perf_counter()
            take_step(arm, window)  # waits for the device
            seconds[num].append(time.perf_counter() - started)
    return [_row(arms[num], weighed[num], seconds[num], config.effective_batch) for num in arms]


def _row(arm: Arm, taken: memory.Memory, seconds: list[float], samples: int) -> Row:
    middle = statistics.median(seconds)
    return {
        "accumulation_steps": arm.recipe.accumulation_steps,
        "micro_batch": max(arm.recipe.split(samples)),
        "parameter_bytes": taken.parameters,
        "gradient_bytes": taken.gradients,
        "state_bytes": taken.state,
        "activation_bytes": taken.activations,
        "total_bytes": taken.total,
        "alive_bytes": taken.parameters + taken.state + taken.alive if taken.peak is None else taken.peak,
        "seconds": middle,
        "samples_per_second": samples / middle,
    }
