"""The lint inside flake8: `ACC` is its prefix, and each cause has a number, which `# noqa: ACC101` names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint.__main__ import found
from accumulation_harness.lint.source import Source

CODES = {  # numbers stay what they are; a new cause takes the next
    Cause.loss_not_divided: 101,
    Cause.loss_divided_twice: 102,
    Cause.mean_of_means: 103,
    Cause.short_window_divided_by_n: 104,
    Cause.auxiliary_loss_scale: 105,
    Cause.gradients_cleared_in_window: 106,
    Cause.gradients_not_cleared: 107,
    Cause.step_every_micro_batch: 108,
    Cause.clip_per_micro_batch: 109,
    Cause.clip_before_unscale: 110,
    Cause.schedule_per_micro_batch: 111,
    Cause.ema_per_micro_batch: 112,
    Cause.weight_decay_per_micro_batch: 113,
    Cause.scaler_updated_in_window: 114,
    Cause.non_finite_micro_batch: 115,
    Cause.window_misplaced: 116,
    Cause.replicas_not_synchronised: 117,
    Cause.counter_wrong: 118,
    Cause.foreign_gradients: 119,
    Cause.sum_rescaled_in_window: 120,
}


class Checker:
    """What flake8 makes for every file."""

    def __init__(self, tree: ast.AST, lines: Sequence[str]) -> None:  # by these names flake8 hands over what it has read
        self._text = "".join(lines)

    def run(self) -> Iterator[tuple[int, int, str, type[Any]]]:
        """Yield line, column from 0, text and checker of every hit."""
        for hit in found(Source(self._text)):
            if hit.sure:
                yield hit.line, hit.column - 1, f"ACC{CODES[hit.cause]} {hit.told()}", type(self)
