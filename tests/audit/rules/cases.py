"""Plain numbers as the rules read them, and a case for every cause that one rule gives by itself."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

from accumulation_harness.audit.compare.facts import Compared, RowFacts, RunFacts, RunSeen, StepFacts, Window
from accumulation_harness.judge.cause import Cause

T = TypeVar("T", StepFacts, RunFacts)

GATE = 1e-6
SAME = Compared(distance=0.0, scale=1.0, cosine=1.0)
EQUAL = StepFacts(
    accumulation_steps=4,
    track="SGD",
    step=0,
    gate=GATE,
    consumed=SAME,
    raw=SAME,
    window=Window(backwards=4, reference_backwards=1, rows="same"),
)
OFF = replace(EQUAL, consumed=replace(SAME, distance=0.5), raw=replace(SAME, distance=0.5))
SEEN = RunSeen(steps=3, backwards=(1, 1, 1), lrs=((0.1,),) * 3, schedule_calls=(1, 1, 1), state_steps=(1.0, 2.0, 3.0))
RUN = RunFacts(
    accumulation_steps=4,
    track="SGD",
    mine=replace(SEEN, backwards=(4, 4, 4)),
    reference=SEEN,
    windows=("same",) * 3,
    repeated=(0, 0, 0),
)
ALL_EQUAL = [replace(EQUAL, step=t) for t in range(3)]
FIRST_EQUAL = [EQUAL, replace(OFF, step=1), replace(OFF, step=2)]


def changed(facts: T, **changes: Any) -> T:
    """The facts with other fields; a dict changes fields of a group, as in `window={"backwards": 2}`."""
    groups = {name: getattr(facts, name) for name, value in changes.items() if isinstance(value, dict)}
    inside = {name: replace(group, **changes[name]) for name, group in groups.items() if is_dataclass(group)}
    return replace(facts, **(changes | inside))


ROWS = RowFacts(outputs=0.0, residual=1e-7, factors=((1.0, 0.5), (2.0, 1.5)))

STEPS: list[tuple[str, dict[str, Any], Cause]] = [  # of a step whose gradient differs
    ("sum of losses", {"fits": {"times_n": 1e-8}}, Cause.loss_not_divided),
    ("sum of a short window", {"window": {"backwards": 2}, "fits": {"times_k": 1e-8}}, Cause.loss_not_divided),
    ("rows added", {"window": {"num_rows": 16}, "fits": {"times_rows": 1e-8}}, Cause.loss_not_divided),
    ("one N too many", {"fits": {"over_n": 1e-8}}, Cause.loss_divided_twice),
    ("one K too many", {"window": {"backwards": 2}, "fits": {"over_k": 1e-8}}, Cause.loss_divided_twice),
    ("one R too many", {"window": {"num_rows": 16}, "fits": {"over_rows": 1e-8}}, Cause.loss_divided_twice),
    ("short window", {"window": {"backwards": 2}, "fits": {"k_over_n": 1e-8}}, Cause.short_window_divided_by_n),
    (
        "other weights",
        {"parts": {"residual": 1e-8, "weights": (0.5, 1.5, 0.8, 1.2), "condition": 2.0}, "fits": {"sum_line": 1e-8}},
        Cause.mean_of_means,
    ),
    (
        "other weights, shortened",
        {
            "parts": {"residual": 1e-8, "weights": (1.0, 3.0, 1.6, 2.4), "condition": 2.0, "as_added": 0.5},
            "fits": {"sum_line": 1e-8},
        },
        Cause.mean_of_means,
    ),
    (
        "other weights, by nobody knows what",
        {"parts": {"residual": 1e-8, "weights": (1.0, 3.0, 1.6, 2.4), "condition": 2.0}, "fits": {"sum_line": 1e-8}},
        Cause.unexplained,
    ),
    ("cleared", {"accumulator": {"cleared_inside": 3}, "fits": {"since_clear": 1e-8}}, Cause.gradients_cleared_in_window),
    ("first kept", {"fits": {"first": 1e-8}}, Cause.accumulator_overwritten),
    ("last kept", {"fits": {"last": 1e-8}}, Cause.accumulator_overwritten),
    ("stale", {"accumulator": {"stale": True}, "fits": {"stale": 1e-8}}, Cause.gradients_not_cleared),
    ("16 bits", {"precision": {"narrow": "bfloat16"}, "fits": {"sum": 1e-8, "own_sum": 1e-3}}, Cause.low_precision_accumulator),
    ("clipped inside", {"scaling": {"clips_inside": 3}, "fits": {"sum": 1e-8}}, Cause.clip_per_micro_batch),
    ("one norm", {"scaling": {"rescaled": (0.1, 0.1)}, "fits": {"sums": 1e-8}}, Cause.clip_per_micro_batch),
    ("clipped scaled", {"scaling": {"clips_scaled": True}}, Cause.clip_before_unscale),
    (
        "clipped, then divided",
        {"scaling": {"clipped": True}, "fits": {"over_n": 1e-8, "clipped_then_divided": 1e-8}},
        Cause.clip_before_unscale,
    ),
    ("scale moves", {"scaling": {"loss_scales": 2}}, Cause.scaler_updated_in_window),
    ("unscaled inside", {"scaling": {"unscaled_inside": 3}, "fits": {"sums": 1e-8}}, Cause.scaler_updated_in_window),
    (
        "halved each time",
        {
            "scaling": {"rescaled": (0.3, 0.2)},
            "taken": {"residual": 1e-8, "weights": (0.125, 0.25, 0.25, 0.5), "condition": 2.0},
        },
        Cause.sum_rescaled_in_window,
    ),
    (
        "clipped aside",
        {
            "fits": {"sums": 1e-8},
            "taken": {"residual": 1e-8, "weights": (0.5, 0.25, 1.0, 1.0), "condition": 2.0, "sizes": (2.0, 4.0, 0.7, 0.5)},
        },
        Cause.clip_per_micro_batch,
    ),
    (
        "clipped aside, of means",
        {
            "fits": {"sums_line": 1e-8},
            "taken": {"residual": 1e-8, "weights": (0.5, 0.25, 1.0, 1.0), "condition": 2.0, "sizes": (2.0, 4.0, 0.7, 0.5)},
        },
        Cause.clip_per_micro_batch,
    ),
    (
        "rows clipped, at N=1 as well",
        {
            "fits": {"sums": 1e-8, "line": 1e-8, "over_n": 1e-8},
            "taken": {"residual": 1e-8, "weights": (0.5, 0.25, 1.0, 1.0), "condition": 2.0, "sizes": (2.0, 4.0, 0.7, 0.5)},
        },
        Cause.loss_divided_twice,
    ),
    ("clamped aside", {"fits": {"sums": 1e-8, "clamped_parts": 1e-8}}, Cause.clip_per_micro_batch),
    ("clamped inside", {"fits": {"sum": 1e-8, "clamped": 1e-8}}, Cause.clip_per_micro_batch),
    (
        "a temperature",
        {
            "partly": ("scale",),
            "fits": {"some_times_n": 1e-8, "own_sum": 0.0},
            "probe": {"coupled": True},
            "parts": {"residual": 0.3},
        },
        Cause.auxiliary_loss_scale,
    ),
    ("13 for 16", {"raw": {"scale": 0.8125}, "fits": {"line": 1e-8}}, Cause.counter_wrong),
    ("decay inside", {"window": {"moves": 4, "move_along_weights": -1.0}}, Cause.weight_decay_per_micro_batch),
    ("moves inside", {"window": {"moves": 4, "move_along_weights": 0.1}}, Cause.unexplained),
    ("coupled", {"probe": {"coupled": True}, "parts": {"residual": 0.3}}, Cause.non_separable_loss),
    ("drawn inside", {"window": {"drawn_inside": True}, "parts": {"residual": 0.3}}, Cause.stochastic_layers),
    ("noise after each", {"window": {"drawn_between": True}, "fits": {"sums": 1e-8}}, Cause.stochastic_layers),
    ("on all ranks", {"ranks": 2, "fits": {"times_ranks": 1e-8}}, Cause.replica_scale),
    ("on one rank of two", {"ranks": 2, "fits": {"over_ranks": 1e-8}}, Cause.replica_scale),
    ("somebody else's", {"fits": {"without_foreign": 1e-8}}, Cause.foreign_gradients),
    ("found", {"accumulator": {"found_changed": True}, "fits": {"sum": 1e-8}}, Cause.foreign_gradients),
    ("terms miscounted", {"probe": {"same_at_one": True}, "fits": {"line": 1e-8}}, Cause.counter_wrong),
    ("penalty", {"fits": {"along_weights": 1e-8}}, Cause.auxiliary_loss_scale),
    ("penalty of absolute values", {"fits": {"along_signs": 1e-8}}, Cause.auxiliary_loss_scale),
    ("frozen", {"probe": {"agrees_when_frozen": True}, "parts": {"residual": 0.3}}, Cause.cached_weights_stale),
    (
        "buffers that move once per window",
        {"probe": {"agrees_when_held": True}, "layers": {"buffers": ("u",)}, "parts": {"residual": 0.3}},
        Cause.stateful_forward,
    ),
    (
        "buffers that move and are not what differs",
        {"probe": {"coupled": True}, "layers": {"buffers": ("u",)}, "parts": {"residual": 0.3}},
        Cause.non_separable_loss,
    ),
    ("factors of rows", {"probe": {"by_row": ROWS}, "parts": {"residual": 0.3}}, Cause.normaliser_depends_on_split),
    (
        "buffers that a forward uses",
        {
            "probe": {"by_row": replace(ROWS, outputs=0.1), "made": True},
            "layers": {"buffers": ("u",)},
            "parts": {"residual": 0.3},
        },
        Cause.stateful_forward,
    ),
    (
        "rows chosen",
        {"probe": {"by_row": replace(ROWS, factors=((1.0, 0.0), (2.0, 2.0)))}, "parts": {"residual": 0.3}},
        Cause.non_separable_loss,
    ),
    ("underflow", {"precision": {"lost": 0.2, "float16": True}}, Cause.underflow_from_division),
    ("nothing fits", {"fits": {"times_n": 0.3}, "parts": {"residual": 0.4}}, Cause.unexplained),
]

AT_EVERY_N = {"stale", "clipped scaled", "decay inside", "moves inside", "underflow"}  # also told where gradients agree

RUNS: list[tuple[str, dict[str, Any], Cause]] = [  # of a run whose gradients agree
    ("tail dropped", {"mine": {"steps": 2}}, Cause.window_misplaced),
    ("steps inside", {"mine": {"steps": 12, "backwards": (1,) * 12}}, Cause.step_every_micro_batch),
    ("state inside", {"mine": {"idle_steps": 9}}, Cause.optimizer_state_per_micro_batch),
    ("counter", {"mine": {"state_steps": (4.0, 8.0, 12.0)}}, Cause.optimizer_state_per_micro_batch),
    ("schedule", {"mine": {"lrs": ((0.1,), (0.06,), (0.03,)), "schedule_calls": (4, 4, 4)}}, Cause.schedule_per_micro_batch),
    (
        "laid out",
        {"mine": {"lrs": ((0.1,), (0.11,), (0.13,)), "horizon": 25.0}, "reference": {"horizon": 7.0}},
        Cause.schedule_per_micro_batch,
    ),
    (
        "laid out, with a short window",
        {
            "mine": {"lrs": ((0.1,), (0.11,), (0.13,)), "horizon": 19.0, "backwards": (4, 4, 1)},
            "reference": {"horizon": 7.0},
        },
        Cause.schedule_per_micro_batch,
    ),
    (
        "another length",
        {"mine": {"lrs": ((0.1,), (0.11,), (0.13,)), "horizon": 14.0}, "reference": {"horizon": 7.0}},
        Cause.unexplained,
    ),
    ("rates", {"mine": {"lrs": ((0.1,), (0.2,), (0.3,))}}, Cause.unexplained),
    ("average", {"shadow_distances": ((1, 0.5, 1e-3),), "mine": {"shadow_updates": (4, 4, 4)}}, Cause.ema_per_micro_batch),
    ("statistics", {"mine": {"norm_updates": (4, 8, 12)}, "reference": {"norm_updates": (1, 2, 3)}}, Cause.batch_statistics),
    ("counts", {"mine": {"counts": {"samples": 48.0}}, "reference": {"counts": {"samples": 12.0}}}, Cause.counter_wrong),
    ("report", {"mine": {"reported": (1.0, 2.0, 3.0)}, "reference": {"reported": (1.0, 2.0, 12.0)}}, Cause.loss_report_differs),
]

WINDOWS: list[tuple[str, dict[str, Any], Cause]] = [  # of a run whose gradients differ from the second step on
    ("other rows", {"windows": ("same", "different", "different")}, Cause.window_misplaced),
    ("rows again", {"windows": ("same", "different", "different"), "repeated": (0, 8, 8)}, Cause.samples_repeated),
    ("other data", {"windows": ("same", "different", "different"), "foreign": 8, "never": 8}, Cause.unexplained),
    ("not a number", {"mine": {"broken_windows": (1,)}}, Cause.non_finite_micro_batch),
    ("resumed", {"resumed": ((1, 2),)}, Cause.resume_in_window),
]
