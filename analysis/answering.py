"""The vocabulary of answers: what a question's rules, sections and figures are written with."""

from __future__ import annotations

from accumulation_harness.analysis.content import (
    Block,
    Picture,
    Section,
    Table,
    counted,
    ends,
    estimated,
    interval,
    names,
    number,
    plain,
    power,
    section,
    share,
    span,
    table,
    table_by,
)
from accumulation_harness.analysis.figures.forms import (
    band_curve,
    by_optimizer,
    columns_over,
    curves,
    formula,
    lines,
    mean_curve,
    median_curve,
    points,
)
from accumulation_harness.analysis.figures.style import (
    DASHED,
    INK,
    log_axis,
)
from accumulation_harness.analysis.load import Results, Unmeasured, needed
from accumulation_harness.analysis.question import (
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    Advice,
    Answer,
    Claim,
    ClaimResult,
    Experiment,
    Material,
    Ruling,
    claim,
    not_measured,
    over_settings,
    takes,
    undecided,
)
from accumulation_harness.analysis.rates import Rate, of_trials, percent, rate
from accumulation_harness.judge import statistics
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE, ROUNDING_GATE, TRAJECTORY_GATE
from accumulation_harness.judge.interval import Interval
from accumulation_harness.results.cells import spread
