"""The sections on BatchNorm: from measurements to what is shown of them."""

from __future__ import annotations

from analysis import batch_norm_figures as figures
from analysis.batch_norm import EXACT, exact_rows, of_study
from analysis.content import Material, Picture, Section, Table, Text, number

WORDS = {
    "accumulated": "none",
    "corrected_momentum": "momentum 1 - (1 - m)^(1/N)",
    "window_statistics": "running statistics pooled over the window",
    "frozen_statistics": "frozen statistics",
    "detached_statistics": "window statistics as constants",
    "two_pass_statistics": "two-pass statistics",
    "ghost_full_batch": "Ghost BatchNorm in the full batch",
}
VERDICTS = {
    "accumulated": "",
    "corrected_momentum": "mends the rate of the running statistics; not the gradient",
    "window_statistics": "mends rate and pooling of the running statistics (the first layer's exactly); not the gradient",
    "frozen_statistics": "mends the dependence on the split; is no longer BatchNorm, and needs statistics from elsewhere",
    "detached_statistics": "mends the running statistics and the dependence on N; the gradient is wrong at every N, also at 1",
    "two_pass_statistics": "mends gradient and running statistics, exactly; 2L + 1 forwards and L + 1 backwards for L layers",
    "ghost_full_batch": "mends nothing: makes the full batch the same other computation, which is then exactly accumulation",
}


def gradient_over_b(material: Material) -> Section | None:
    rows = of_study(material.results, EXACT)
    if rows.empty:
        return None
    rows = rows[(rows["norm"] == "batch") & (rows["momentum"] == 0.1)]
    plain = exact_rows(material.results, "accumulated")
    influence = float(plain["influence"].max())
    first = plain[plain["after_steps"] == 0].groupby("micro_batch")[["gradient_error", "bias", "spread"]].median()
    small, large = first.index.min(), first.index.max()
    text = (
        f"At the initial weights the gradient of b = {large} is {number(first['gradient_error'][large])} off (relative, median), "
        f"that of b = {small} {number(first['gradient_error'][small])}. All of it is the batch statistics' doing. The running "
        f"statistics have no part in it: other buffers change the gradient by {number(influence)} exactly. Cutting the window in "
        f"other ways splits the error: what all cuts have in common is a bias ({number(first['bias'][large])} and "
        f"{number(first['bias'][small])}), which averaging over steps does not remove; the rest is scatter from cut to cut "
        f"({number(first['spread'][large])} and {number(first['spread'][small])})."
    )
    picture = Picture(
        "gradient-over-b",
        figures.figure_gradient_over_b(rows),
        "Relative gradient error over the micro-batch size at fixed effective batch, with its bias, the error against Ghost "
        "BatchNorm and that of two-pass statistics.",
        f"Same weights, same window of B = {int(rows['effective_batch'].max())}, float64; medians and ranges over trials. "
        "Diamonds: the distance to a full batch that normalises in chunks of b: nothing else is left of the difference. Late in "
        "training the full gradient is small, so that the same disturbance is relatively larger. Not shown by this: what it does "
        "to accuracy.",
    )
    return Section("The gradient: batch statistics", (Text(text), picture))


def running_statistics(material: Material) -> Section | None:
    plain = exact_rows(material.results, "accumulated", all_momenta=True)
    corrected = exact_rows(material.results, "corrected_momentum", all_momenta=True)
    if plain.empty or corrected.empty:
        return None
    usual = exact_rows(material.results, "accumulated")
    after = usual[usual["after_steps"] == 0].groupby("accumulation_steps")["statistics_error"].median()
    mended = exact_rows(material.results, "corrected_momentum")
    left = mended[mended["after_steps"] == 0].groupby("accumulation_steps")["statistics_error"].median()
    most = int(after.index.max())
    text = (
        "Every micro-batch moves the running statistics, N times in a window. The update is affine in what was there before, so "
        "two starts measure exactly how much of it is left. In the first window the running statistics of N = "
        f"{most} end {number(after[most])} times the full batch's own movement away from where the full batch's end; with the "
        f"corrected momentum {number(left[most])}. The rest cannot be mended by a rate: layers behind the first normalisation "
        "see other inputs, and the last micro-batches still weigh more."
    )
    picture = Picture(
        "effective-momentum",
        figures.figure_effective_momentum(plain, corrected),
        "Effective momentum of the running statistics over N for three momenta, measured points on the curves of the formula.",
        "Points: measured on the buffers of the loop under test, float64. Lines: 1 - (1 - m)^N at the left, m at the right.",
    )
    return Section("The running statistics: an effective momentum", (Text(text), picture))


def remedies(material: Material) -> Section | None:
    rows = of_study(material.results, EXACT)
    if rows.empty:
        return None
    rows = rows[(rows["norm"] == "batch") & (rows["momentum"] == 0.1) & (rows["after_steps"] == 0)]
    smallest = int(rows["micro_batch"].min())
    own = rows[rows["micro_batch"] == smallest]
    columns = ["gradient_error", "split_error", "statistics_error", "effective_momentum", "forwards"]
    table = own.groupby("arm")[columns].median()
    table.loc["frozen_statistics", ["statistics_error", "effective_momentum"]] = float("nan")  # they do not move
    cells = [(words, *(number(float(table[name][arm])) for name in columns), VERDICTS[arm]) for arm, words in WORDS.items()]
    head = ("remedy", "gradient off", "depends on N", "running statistics off", "effective momentum", "forwards", "what it does")
    caption = (
        f"One window at the initial weights, b = {smallest}, medians over {own['trial'].nunique()} trials. Gradient off: "
        "relative distance to the full batch's BatchNorm gradient. Depends on N: distance to the same arm at N = 1. Running "
        "statistics off: distance to the full batch's after the window, relative to how far those moved. Forwards: samples that "
        "went through the model, over the window's. GroupNorm and LayerNorm: no batch statistics at all, and exact at every N "
        "(see their experiment); another model, whose accuracy is its own."
    )
    return Section("Remedies side by side", (Table(head, tuple(cells), caption),))
