"""When a further null is run."""

from __future__ import annotations

import pytest

from accumulation_harness.audit.compare.facts import Facts
from accumulation_harness.audit.evidence import FLOAT32
from accumulation_harness.audit.extra_runs import _is_marginal
from tests.audit.rules.cases import EQUAL, RUN, changed

AMPLIFIED, USUAL = 1e-3, 1e-5


@pytest.mark.parametrize(
    ("gate", "distances", "marginal"),
    [
        (AMPLIFIED, (0.0, 1.1), True),
        (AMPLIFIED, (3.9, 1.1), True),
        (AMPLIFIED, (4.1, 1.1), False),  # one window differs clearly
        (AMPLIFIED, (0.0, 1.0), False),  # nothing differs
        (USUAL, (0.0, 1.1), False),  # rounding was not amplified: what differs is no rounding
    ],
)
def test_a_further_null_is_for_what_barely_differs_where_rounding_was_amplified(
    gate: float, distances: tuple[float, ...], marginal: bool
) -> None:
    """Distances in gates."""
    seen = [{"distance": gates * gate} for gates in distances]
    steps = tuple(changed(EQUAL, gate=gate, step=t, consumed=own, raw=own) for t, own in enumerate(seen))
    assert _is_marginal([Facts(RUN, steps)], FLOAT32) == marginal
