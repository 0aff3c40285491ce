"""The vocabulary of measurements: what a question's studies are written with."""

from __future__ import annotations

from accumulation_harness.config.arm_name import ACCUMULATED, FULL, PERMUTED, ArmName
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting, Watch, arm_state
from accumulation_harness.measure.training import HELD_OUT_BATCH, OnStep, Row, evaluations, outcome
from accumulation_harness.measure.trial import (
    Candidate,
    accumulated,
    full_batch,
    permuted,
    split_plan,
    standard_candidates,
    with_faults,
)
from accumulation_harness.recipes.recipe import (
    BOUNDARY,
    Arm,
    Normalise,
    Recipe,
    Stage,
    evaluated,
    take_step,
    window_total,
)
from accumulation_harness.referee.gradients import by_tensor, compare, decompose, flatten, gradients, relative_distance
from accumulation_harness.referee.oracle import Inside, Referee, State, clipped, running_statistics, snapshot
from accumulation_harness.system import pytree
from accumulation_harness.workloads import Batch
