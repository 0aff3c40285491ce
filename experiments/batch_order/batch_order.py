"""Large batches first and small ones then, or the reverse: trainings that change the batch at half their samples.

Theory has it that the critical batch size grows along a training (McCandlish et al. 2018, arXiv:2505.23971): small batches should
pay early and large ones late. All see the same windows in the same order, and end at the same number of samples.
"""

from __future__ import annotations

import copy
from dataclasses import KW_ONLY, dataclass

from accumulation_harness.experiments.convergence.learning_curves import Samples, arm_at, evaluation
from accumulation_harness.experiments.shared.convergence import Training, chosen_arms, train
from accumulation_harness.experiments.shared.measuring import Arm, ArmName, Batch, OnStep, Row, Setting

LARGE, SMALL = "large", "small"  # a window of B samples, and B / N of them
ORDERS = {
    LARGE: (LARGE, LARGE),
    SMALL: (SMALL, SMALL),
    "large_then_small": (LARGE, SMALL),
    "small_then_large": (SMALL, LARGE),
}


@dataclass(eq=False)
class Run(Training):
    """A training in two halves, each at a batch of its own."""

    _: KW_ONLY
    second: Arm  # of the second half, which goes on from where the first has ended
    half: int  # windows before it
    validation: Batch
    switch_loss: float = 0.0  # on the validation set, at half the samples

    def before(self, t: int, window: Batch) -> None:
        """Change the batch at half the samples."""
        if t == self.half:
            self.switch_loss = evaluation(self.arm, self.validation)
            continue_from(self.second, self.arm)
            self.arm = self.second


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per order and N, with the losses in nats per loss term where the training ends.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with the order, N, `samples`, `switch_loss`, `validation_loss` and `test_loss`.
    """
    config, chosen = setting.config, Samples.drawn(setting)
    every = [ArmName(order, num) for num in config.accumulation_steps if num > 1 for order in ORDERS]
    runs = []
    for one in chosen_arms(config, every):
        first, second = (arm_at(setting, 1 if size == LARGE else one.accumulation_steps) for size in ORDERS[one.name])
        validation = first.workload.batch(chosen.validation)
        runs.append(Run(one, first, second=second, half=config.steps // 2, validation=validation))
    train(setting, runs, on_step, chosen.windows(setting))
    return [
        {**run.name.columns, "samples": run.samples, "switch_loss": run.switch_loss,
         "validation_loss": evaluation(run.arm, run.validation), "test_loss": evaluation(run.arm, run.arm.workload.held_out)}
        for run in runs
    ]  # fmt: skip


def continue_from(arm: Arm, before: Arm) -> None:
    """Give `arm` the weights and the optimizer's state of `before`; its settings stay.

    Args:
        arm: The arm that goes on.
        before: The arm that has ended.
    """
    arm.model.load_state_dict(before.model.state_dict())
    state = copy.deepcopy(before.optimizer.state_dict()["state"])
    arm.optimizer.load_state_dict({"state": state, "param_groups": arm.optimizer.state_dict()["param_groups"]})
