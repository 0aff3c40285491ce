"""Is GroupNorm the better choice with accumulation?"""

from __future__ import annotations

from analysis import batch_norm_sections as shown
from analysis.batch_norm import EXACT, MARGIN, SCARCE, between_norms, fixed_batch, trained
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Ruling, undecided
from harness.judge.gates import ALGEBRA_GATE


def better_choice(results: Results) -> ClaimResult:
    """B3: tests whether GroupNorm is exact at every N, and what error it saves at b = 2 and at the full batch, at fixed B."""
    exact = results.study(EXACT)
    own = exact[exact["norm"].isin(["group", "layer"])] if len(exact) else exact
    rows = trained(results)
    gains = between_norms(fixed_batch(rows)) if len(rows) else rows
    gains = gains[gains["model"] == "mlp"] if len(gains) else gains
    if own.empty or gains.empty or not {SCARCE, int(gains["effective_batch"].max())} <= set(gains["b"]):
        return undecided(
            "It takes exact trials with GroupNorm, and trained ones with both at b = 2 and b = B.", len(own) + len(gains)
        )
    worst = float(own["gradient_error"].max())
    small = gains.sort_values("b").iloc[0]
    large = gains.sort_values("b").iloc[-1]
    n = int(gains["n"].sum())
    better_small, better_large = small["low"] > MARGIN, large["low"] > 0
    if worst > ALGEBRA_GATE or small["high"] < 0:
        verdict = Ruling.refuted
    elif better_small and better_large:
        verdict = Ruling.confirmed
    elif better_small and large["high"] < MARGIN:
        verdict = Ruling.conditional
    else:
        return undecided(f"{int(small['n'])} seeds do not tell whether GroupNorm gains at b = {SCARCE} and at the full batch.", n)
    return ClaimResult(
        verdict=verdict,
        measured=float(small["gain"]),
        threshold=f"gradient <= {ALGEBRA_GATE:.0e}; gain > {MARGIN:g} point at b = {SCARCE}, < {MARGIN:g} at b = B",
        n=len(own) + n,
        explanation=f"Exact at every N (largest float64 difference {worst:.0e}, {len(own)} arms), so that b does not matter to "
        f"it. It saves {small['gain']:.3g} points of error at b = {SCARCE} ({small['low']:.2g} to {small['high']:.2g}), and "
        f"{large['gain']:.2g} ({large['low']:.2g} to {large['high']:.2g}) at b = {int(large['b'])}, the full batch: no gain "
        "there.",
    )


CLAIMS = (
    Claim(
        id="B3",
        expects=Ruling.conditional,
        rule=f"Conditional when GroupNorm is exact, gains more than {MARGIN:g} point at b = {SCARCE} and less than that at the "
        "full batch (95% t intervals, paired by seed); confirmed when it gains at both; refuted when it is not exact or loses at "
        f"b = {SCARCE}.",
        decide=better_choice,
    ),
)

EXPERIMENT = Experiment(
    name="groupnorm",
    title="Is GroupNorm the better choice with accumulation?",
    question="GroupNorm sees one sample at a time. Is it exact under accumulation? Is it more accurate when b falls at a fixed "
    "B, and when b falls with B, as Wu & He measured it?",
    prediction="It is exact at every N. At fixed B BatchNorm's error rises as b falls, most from 4 to 2, and GroupNorm's does "
    "not; at large b BatchNorm is no worse. The shape is the same when B grows with b and the learning rate with B.",
    rule="Float64 gradients decide on exactness. Differences of accuracy are paired by seed: 95% t intervals against a margin of "
    f"{MARGIN:g} percentage point. Of Wu & He's curves only the shape is compared: order, sign and place of the steepest rise.",
    claims=CLAIMS,
    sections=(shown.wu_and_he, shown.wu_and_he_growing, shown.exact_at_every_n),
)
