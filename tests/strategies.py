"""Strategies of hypothesis: right trials with settings drawn over all that is accepted, and training loops that are watched.

The trials are of sizes that take about a second. Left out: what needs files, minutes or a GPU, and methods and losses that have
a question of their own.
"""

import math
from dataclasses import dataclass
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st

from accumulation_harness.config import (
    OUR_OPTIMIZERS,
    ConfigError,
    Data,
    DataConfig,
    LastWindow,
    Model,
    Norm,
    OptimizerConfig,
    Precision,
    ScheduleConfig,
    ScheduleName,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.config.settings import settings as all_settings
from accumulation_harness.config.validation import validate

BOUNDS = {name: one.bounds for name, one in all_settings().items() if one.bounds}
DATA = (Data.digits, Data.text, Data.pairs, Data.policy, Data.ignored_labels, Data.class_weights)
NORMS = (Norm.none, Norm.group, Norm.layer, Norm.batch)
SHARES = st.one_of(st.floats(0, 0.999), st.sampled_from((0.5, 0.9, 0.95, 0.99, 0.999)))


def fixed(examples):
    """So many examples, the same in every run."""
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None)


def decades(low, high):
    """10^u with u in [low, high]."""
    return st.floats(low, high).map(lambda u: float(f"{10**u:.6g}"))


def mostly(usual, name):
    """Now and then over all that the bounds of a setting allow, where most of it overflows or does nothing."""
    bounds = BOUNDS[name]
    anywhere = decades(math.log10(bounds.low or 1e-12) + 1e-5, math.log10(bounds.high) - 1e-5)
    return st.integers(0, 9).flatmap(lambda k: anywhere if k == 9 else usual)


def or_none(values):
    return st.one_of(st.none(), values)


def can_run(config):
    """Accepted, and (a little too strictly) fitting its data: two rows for BatchNorm, a loss term in each window."""
    batch, num = config.effective_batch, max(config.accumulation_steps)
    try:
        validate(config)
    except ConfigError:
        return False
    if config.norm == Norm.batch and config.workload.model == Model.mlp:
        return config.data.last_window == LastWindow.drop and batch >= num + num * (num + 1) / 2
    return config.workload.data != Data.ignored_labels or batch >= 16  # a third of the labels are ignored


def _of(place, numbers):
    data, model, norm = map(st.just, place)
    return st.builds(
        TrialConfig,
        workload=st.builds(
            WorkloadConfig,
            data=data,
            model=model,
            width=st.integers(1, 8),
            depth=st.integers(1, 3),
            dropout=st.sampled_from((0.0,) * 9 + (0.5,)),
            penalty=st.one_of(st.just(0.0), mostly(decades(-6, 1), "workload.penalty")),
        ),
        data=st.builds(DataConfig, last_window=st.sampled_from(LastWindow)),
        norm=norm,
        optimizer=st.builds(
            OptimizerConfig,
            name=st.sampled_from(OUR_OPTIMIZERS),
            lr=mostly(decades(-6, 0), "optimizer.lr"),
            momentum=SHARES,
            beta1=SHARES,
            beta2=SHARES,
            eps=mostly(decades(-16, 0), "optimizer.eps"),
            weight_decay=st.one_of(st.just(0.0), mostly(decades(-6, 0), "optimizer.weight_decay")),
        ),
        schedule=st.builds(ScheduleConfig, name=st.sampled_from(ScheduleName), warmup_steps=st.integers(0, 20)),
        clip_norm=or_none(mostly(decades(-6, 2), "clip_norm")),
        ema_decay=or_none(st.floats(0.001, 0.999)),
        precision=st.sampled_from(Precision),
        loss_scale=mostly(decades(0, 5.2), "loss_scale"),
        effective_batch=st.one_of(st.integers(2, 32), st.integers(2, 32), st.integers(33, 400)),  # large: the end of an epoch
        accumulation_steps=numbers,
        split=st.sampled_from(Split),
        steps=st.integers(1, 6),
        algebra_steps=or_none(st.integers(1, 20)),
        probe_every=st.integers(1, 12),
        referee_every=st.integers(1, 12),
        permutations=st.integers(30, 40),
        nulls=st.integers(1, 5),
        seed=st.integers(0, 2**31),
    )


def _goes_together(data, model, norm):
    workload, whole = WorkloadConfig(data=data, model=model), DataConfig(last_window=LastWindow.drop)
    return can_run(TrialConfig(workload=workload, norm=norm, data=whole))


PLACES = [one for one in product(DATA, (Model.conv, Model.mlp, Model.transformer), NORMS) if _goes_together(*one)]
MICRO_BATCHES = st.lists(st.integers(1, 16), min_size=1, max_size=2, unique=True).map(lambda found: tuple(sorted(found)))


def right_trials(numbers=MICRO_BATCHES, norms=NORMS):
    """Trials whose arms are all right; `numbers`: their N."""
    places = st.sampled_from([place for place in PLACES if place[2] in norms])
    return places.flatmap(lambda place: _of(place, numbers)).filter(can_run)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The settings of one loop that is watched."""

    seed: int
    width: int
    sizes: tuple[int, ...]  # rows of each micro-batch
    loss: str
    precision: str
    optimizer: str
    clipped: bool
    short: bool  # the last window
    replayed: bool


def watched_loops():
    """Loops with 2 to 6 micro-batches, of equal sizes or not."""
    sizes = st.one_of(
        st.lists(st.integers(2, 9), min_size=2, max_size=6), st.builds(lambda n, b: [b] * n, st.integers(2, 6), st.integers(3, 9))
    )
    return st.builds(
        Watched,
        seed=st.integers(0, 2**31),
        width=st.sampled_from((16, 64)),
        sizes=sizes.map(tuple),
        loss=st.sampled_from(("cross_entropy", "by_hand", "smoothed", "ignored", "binary", "squared")),
        precision=st.sampled_from(("float32", "bfloat16", "float16")),
        optimizer=st.sampled_from(("SGD", "AdamW", "Adam", "RMSprop")),
        clipped=st.booleans(),
        short=st.booleans(),
        replayed=st.booleans(),
    ).filter(lambda loop: not loop.short or len(loop.sizes) > 2)
