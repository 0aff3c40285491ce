"""A small hand-built store: numbers that are easy to check, written through the store's own interface."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest

from accumulation_harness.config import Norm, Precision, to_dict
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.identity import identity
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.signature import Signature
from accumulation_harness.judge.verdict import Algebra, Evidence, Outcome, Rounding, Trajectory, Verdict
from accumulation_harness.results.judged_arm import EVIDENCE_COLUMNS, Ending, VerdictRow, to_stored
from accumulation_harness.results.store import Store
from tests.trials import trial

STEPS = 12


def arm(config, name, n, shift, **changes):
    """A stored arm; BatchNorm differs and is explained, everything else is equivalent. `changes`: fields of any of its parts."""
    apart = config.norm == Norm.batch and name == "accumulated"

    def part(kind, **values):
        return kind(**values | {key: changes[key] for key in changes.keys() & {field.name for field in dataclasses.fields(kind)}})

    algebra = part(
        Algebra, gradient_error=0.1 * n if apart else 1e-16 * (n + 0.1), state_error=0.0, trajectory_error=1e-15, loss_error=0.0,
        steps=STEPS, floor=3e-16, clipping_active=True, clipped_share=0.0, short_windows=1, unequal_terms=n > 2,
    )  # fmt: skip
    rounding = part(
        Rounding, ratio=1e5 if apart else 1 / (1 + n), low=0.0, high=1.1, full_error=2e-7, arm_error=1e-1 if apart else 1e-7,
        permutations=30, scale=1 + 1e-9 / 3, cosine=1 - 2**-53, residual=1e-8 / 7, weights=(1.0,) * n, condition=1.0,
        skipped=0,
    )  # fmt: skip
    evidence = Evidence(
        precision=config.precision,
        algebra=algebra,
        rounding=rounding,
        trajectory=Trajectory(
            ratio=math.nan if config.precision == Precision.float64 else 0.9, jump_step=None, final_distance=1e-7
        ),
        counters={},
        signature=Signature(wrong_windows=({(Cause.batch_statistics,): 4e-15},) if apart else ()),
    )
    verdict = Verdict(
        verdict=Outcome(changes.get("verdict", Outcome.different if apart else Outcome.equivalent)),
        causes=(Cause.batch_statistics,) if apart else (),
        explained=apart,
    )
    reasons = ("gradients differ",) if verdict.verdict == Outcome.different else ()
    loss = 0.5 + shift
    ending = part(Ending, final_loss=loss, tail_loss=loss, held_out_loss=loss, held_out_accuracy=0.9)
    row = VerdictRow.of(config, ArmName(name, n), config.effective_batch // n, evidence, verdict)
    return to_stored(part(VerdictRow, **vars(row)), reasons, evidence, ending) | {
        name: changes[name] for name in changes.keys() & set(EVIDENCE_COLUMNS)
    }


def shift(seed, n):
    """What the held-out loss of an arm lies above its full batch's."""
    return float(np.random.default_rng(1000 * seed + n).normal(1e-3 * n, 1e-3))


def step_rows(config, losses):
    """`losses`: of further arms, over the loss of the correct arm of the same N."""
    accumulated = [("accumulated", n, 0) for n in config.accumulation_steps]
    arms = [("full", 1, 0), *accumulated, ("permuted", 1, 0), ("null", 1, 0), ("ulp", 1, 0)]
    for step in range(STEPS):
        for name, n, replicate in arms:
            distance = 0.0 if name == "full" else 1e-7 * (1 + n + step)
            yield {
                "step": step,
                "arm": name,
                "accumulation_steps": n,
                "replicate": replicate,
                "loss": 2.0 / (1 + step) + distance,
                "parameter_distance": distance,
            }
        for name, n in ((name, n) for name in losses for n in config.accumulation_steps):
            right = 2.0 / (1 + step) + 1e-7 * (1 + n + step)
            yield {"step": step, "arm": name, "accumulation_steps": n, "replicate": 0, "loss": right * losses[name][step],
                   "parameter_distance": 0.1}  # fmt: skip


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def store_trial(
    results,
    *,
    norm="none",
    optimizer="adam",
    precision="float32",
    seed=0,
    experiment="equivalence",
    change=None,
    faults=None,
    losses=None,
    split="even",
    clip_norm=None,
):
    """Store one finished trial and give its name; `change` maps an arm's (name, N) to columns that are to be otherwise.

    `faults`: arms that are wrong on purpose, and whether that changes anything; `losses`: of such arms, relative to the correct
    arm's.
    """
    settings = f"norm={norm} optimizer.name={optimizer} precision={precision} seed={seed} split={split} accumulation_steps=[2,4]"
    config = dataclasses.replace(trial(settings), experiment=experiment, clip_norm=clip_norm)
    names = [*(("accumulated", n) for n in config.accumulation_steps), ("permuted", 1)]
    names += [(fault, n) for fault in faults or {} for n in config.accumulation_steps]
    arms = [arm(config, name, n, shift(seed, n), **(change or {}).get((name, n), {})) for name, n in names]
    with Store(results).open_trial(experiment, identity(config), to_dict(config)) as writer:
        for row in step_rows(config, losses or {}):
            writer.add(row)
        reference = {"final_loss": 0.5, "tail_loss": 0.5, "held_out_loss": 0.5, "held_out_accuracy": 0.9}
        environment = {"python": "3.11.7", "device": "cpu", "packages": {"torch": "2.13.0"}}
        phases = {"algebra": 1.0, "training": 2.5}
        summary = {"reference": reference, "nulls": [], "environment": environment, "seconds": phases}
        writer.finish({**summary, "arms": arms, "faults": faults or {}})
    return identity(config)


@pytest.fixture
def make_trial(results):
    """`store_trial` into `results`."""
    return partial(store_trial, results)


def store_grid(results):
    """Twelve trials: three normalisations, two optimizers of which one in float32 only, two or three seeds."""
    make = partial(store_trial, results)
    trials = [make(norm=norm, seed=seed) for norm in ("none", "group", "batch") for seed in range(3)]
    return [*trials, *(make(norm=norm, precision="float16") for norm in ("none", "batch")), make(optimizer="sgd")]


@pytest.fixture
def grid(results):
    return store_grid(results)
