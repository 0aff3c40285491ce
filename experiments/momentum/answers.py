"""Does accumulation disturb momentum? And what changes when N small steps replace one window?"""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Advice,
    Cause,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    claim,
    estimated,
    needed,
    number,
    section,
    span,
    statistics,
    table_by,
    takes,
    undecided,
)
from accumulation_harness.experiments.momentum import states as optimizers

APART = 1e-3  # relative, nine decades above the gate of L0: an arm that has to differ must differ by as much
LONG = 200  # optimizer steps after which C3 is decided
ORDERED = 50  # optimizer steps after which C1 and C2 are decided
HALF_LIFE_ERROR = 1e-9  # relative; the fit is exact up to rounding times the condition of the gradients, below 1e3 here
CLOSER = 2.0  # times nearer to the window's path with rate and memory matched than with the rate alone
BOUND = 0.005  # relative change of the loss: S0 says "< 0.5 %"
LEAST_SEEDS = 5  # for the comparison of Adam's beta2


# Rules -------------------------------------------------------------------------------------------------------------------------


@claim(
    "C3",
    REFUTED,
    f"Refuted when state and weights of every accumulated arm equal the full batch's to {ALGEBRA_GATE:.0e} after {LONG} "
    "float64 steps, and those of small-batch training and of a state advanced per micro-batch differ by "
    f"{APART:.0e} or more.",
)
def states_evolve_otherwise(results: Results) -> ClaimResult:
    """C3: compares optimizer state and weights of every accumulated arm after 200 steps with arms that have to differ."""
    rows = optimizers.long_runs(results, LONG)
    right, small = (rows.query("arm == @arm") for arm in ("accumulated", "small_steps"))
    takes(f"It takes trajectories of {LONG} steps.", right, small, n=len(right))
    worst = optimizers.largest_error(right, "state_error", "parameter_error")
    fault = f"arm == '{Cause.optimizer_state_per_micro_batch}' and optimizer != 'sgd'"
    least = optimizers.smallest_difference(rows.query(f"arm == 'small_steps' or ({fault})"))
    if not least >= APART:
        return undecided("An arm that has to differ did not: the comparison could not have seen it.", len(right))
    return ClaimResult(
        verdict=REFUTED if worst <= ALGEBRA_GATE else CONFIRMED,
        measured=worst,
        threshold=f"≤ {ALGEBRA_GATE:.0e}; must differ by ≥ {APART:.0e}",
        n=len(right),
        explanation=f"After {LONG} float64 steps of {', '.join(sorted(set(right['optimizer'])))}, state and weights of "
        f"{len(right)} accumulated arms are the full batch's to {number(worst)}; small-batch training and state advanced per "
        f"micro-batch are off by {number(least)} or more.",
    )


@claim(
    "C1",
    CONDITIONAL,
    f"Two halves, measured over {ORDERED} float64 steps: the bound, that another order of a window's micro-batches "
    f"changes the loss by at most {BOUND:g}; and its reason, that order matters to state and weights or micro-batches "
    f"weigh unequally in the state, by more than {ALGEBRA_GATE:.0e}. Confirmed when both hold, conditional when the bound "
    "alone does, refuted when the bound does not. Small steps must feel the order.",
)
def older_micro_batches(results: Results) -> ClaimResult:
    """C1: tests whether the order inside a window matters, and whether its micro-batches weigh the same in the momentum."""
    reordered, small = optimizers.orders(results, ORDERED)
    reordered, small = reordered[optimizers.uncoupled(reordered)], small[optimizers.uncoupled(small)]
    momentum = reordered.query("optimizer != 'sgd'")
    memory = results.study("optimizer_memory")
    takes("It takes reordered windows and the weights in the state.", momentum, memory, n=len(momentum))
    worst = optimizers.largest_error(reordered, "state_error", "parameter_error")
    spread, spread_small = (optimizers.spread_in_window(memory.query("arm == @arm")) for arm in ("accumulated", "small_steps"))
    if not (optimizers.smallest_difference(small) >= APART and spread_small.min() >= APART):
        return undecided("Small steps in another order have to differ and did not.", len(momentum))
    cost = (momentum["loss"] / momentum["loss_against"] - 1).abs().max()
    where_stale = (small["loss"] / small["loss_against"] - 1).abs().max()
    stale = max(worst, spread.max())
    cheap, fresh = cost <= BOUND, stale <= ALGEBRA_GATE
    return ClaimResult(
        verdict=REFUTED if not cheap else CONDITIONAL if fresh else CONFIRMED,
        condition="as a bound; its reason, that some micro-batches are older, is refuted",
        measured=cost,
        threshold=f"change of the loss ≤ {BOUND:g}; order and weights ≤ {ALGEBRA_GATE:.0e}, must differ by ≥ {APART:.0e}",
        n=len(momentum) + memory["trial"].nunique(),
        explanation=f"Another order inside the window moves state and weights by at most {number(worst)} after {ORDERED} steps "
        f"and the loss by {number(cost)}; first and last micro-batch have the same weight in the state to "
        f"{number(spread.max())}. Under small steps the newest of a window weighs "
        f"{float(spread_small.min()):.0%} or more above the oldest, and another order changes the loss by up to "
        f"{where_stale:.2g} of itself: there staleness exists, and has a price.",
    )


@claim(
    "C2",
    CONDITIONAL,
    "Conditional when the order changes neither gradients nor state nor weights, but does change running statistics and "
    "random draws.",
)
def coupled_in_time(results: Results) -> ClaimResult:
    """C2: tests whether anything but running statistics and random draws couples a micro-batch to those before it."""
    reordered, small = optimizers.orders(results, ORDERED)
    free, bound = reordered[optimizers.uncoupled(reordered)], reordered[~optimizers.uncoupled(reordered)]
    batch_norm, dropout = bound.query("norm == 'batch'"), bound.query("dropout > 0")
    takes(
        "It takes reordered windows without coupling, with BatchNorm and with dropout.",
        free,
        batch_norm,
        dropout,
        n=len(reordered),
    )
    if not optimizers.smallest_difference(small) >= APART:
        return undecided("Small steps in another order have to differ and did not.", len(reordered))
    worst = optimizers.largest_error(free, "gradient_error", "state_error", "parameter_error")
    gradients = optimizers.largest_error(batch_norm, "gradient_error")
    buffers, draws = batch_norm["buffer_error_now"].min(), dropout["gradient_error"].min()
    apart = buffers >= APART and draws >= APART
    return ClaimResult(
        verdict=CONFIRMED if worst > ALGEBRA_GATE else CONDITIONAL if apart else REFUTED,
        condition="through running statistics and random draws alone",
        measured=worst,
        threshold=f"≤ {ALGEBRA_GATE:.0e} where nothing is carried over",
        n=len(reordered),
        explanation=f"Gradients, state and weights do not feel the order ({number(worst)}), nor do gradients under BatchNorm "
        f"({number(gradients)}). Its running statistics do ({number(buffers)} or more), and so do dropout's draws "
        f"({number(draws)}).",
    )


@claim(
    "C10",
    CONFIRMED,
    "Confirmed when the measured half-life is beta's own times the samples per step, when beta^(1/N) gives N small "
    f"steps the half-life of a window, and when it brings their path at least {CLOSER:g} times nearer to the window's in "
    "every trial. The effect of Adam's beta2 on the loss at b = 2 is reported as well.",
)
def memory_in_samples(results: Results) -> ClaimResult:
    """C10: compares half-lives in samples, the paths of the weights and, where it was run, Adam's beta2 at a small batch."""
    lives = optimizers.half_lives(results.study("optimizer_memory"))
    paths = optimizers.path_ratios(optimizers.states(results), ORDERED)
    takes("It takes the weights in the state and paths of small steps.", lives, paths, n=len(lives))
    error = (lives["half_life"] / lives["predicted"] - 1).abs().max()
    matched = lives.pivot_table(index=["trial", "accumulation_steps", "entry"], columns="arm", values="half_life")
    off = (matched["small_steps_memory"] / matched["accumulated"] - 1).abs().max()
    shortened = matched["accumulated"] / matched["small_steps"]
    nearest = paths["ratio"].min()
    sentences = [
        f"The half-life of the state is that of beta times the samples of a step (to {number(error)}): small steps at the same "
        f"beta remember {span(shortened)} times fewer samples, at beta^(1/N) as many.",
        f"With the memory matched, {len(paths)} paths of small steps are {number(nearest)} times or more nearer to the window's "
        "than with the rate alone.",
    ]
    if results.has("batch_sizes"):
        sentences += _beta2_in_words(optimizers.beta2_differences(optimizers.beta2_trials(results)))
    holds = error <= HALF_LIFE_ERROR and off <= HALF_LIFE_ERROR and nearest >= CLOSER
    return ClaimResult(
        verdict=CONFIRMED if holds else REFUTED if nearest < 1 else CONDITIONAL,
        condition=f"for half-lives; paths come {nearest:.2g} times nearer at least",
        measured=nearest,
        threshold=f"≥ {CLOSER:g} times nearer; half-lives within {HALF_LIFE_ERROR:.0e}",
        n=len(lives) + len(paths),
        explanation=" ".join(sentences),
    )


def _beta2_in_words(differences: pd.DataFrame) -> list[str]:
    if len(differences) < LEAST_SEEDS:
        return []
    means = {name: statistics.mean_interval(differences[name].tolist()) for name in differences}
    words = {name: f"{estimated(one)[:-1]}, n = {len(differences)})" for name, one in means.items()}
    return [
        f"Adam at b = 2, loss under beta2 less that under beta2^(1/N): training, at the same rate, {words['training']}; "
        f"held-out, each at its best rate, {words['held_out']}."
    ]


# Page --------------------------------------------------------------------------------------------------------------------------


def states(material: Material) -> Section:
    """State and weights of every arm over the optimizer steps.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    return optimizers.states_section(material, optimizers.long_runs(material.results, LONG))


def _order(material: Material) -> Section:
    """What another order of the micro-batches changes."""
    rows = optimizers.states(material.results).query("after_steps == @ORDERED and arm in ['reordered', 'small_steps_reordered']")
    needed(rows)
    head = "model | dropout | arm | n | gradient | state | weights | running statistics"
    columns = (
        "model", ("dropout", "{:g}".format), ("arm", optimizers.LABELS.get), "trial n", "gradient_error max", "state_error max",
        "parameter_error max", "buffer_error max",
    )  # fmt: skip
    rows = rows.assign(model=rows["workload"] + " " + rows["norm"])
    caption = (
        f"The micro-batches of every window were taken in another order, each with its own samples, for {ORDERED} float64 steps. "
        "Shown: the largest relative difference to the usual order, over trials and N. Small steps are the control: their order "
        "matters."
    )
    return section("The order inside a window", table_by(rows, "model dropout arm", head, columns, caption))


def memory(material: Material) -> Section:
    """The weights of past micro-batches in the optimizer state, and their half-lives.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study("optimizer_memory")
    lives = optimizers.half_lives(rows)
    head = "optimizer | state | arm | N | half-life in samples | predicted | largest relative error | n"
    lives = lives.assign(off=(lives["half_life"] / lives["predicted"] - 1).abs())
    columns = ("optimizer", "entry", ("arm", optimizers.LABELS.get), "accumulation_steps", "half_life median", "predicted median",
               "off max", "trial n")  # fmt: skip
    text = (
        "The state was decomposed into the gradients of all micro-batches seen so far, by least squares at fixed weights "
        f"(largest residual {number(rows['residual'].max())}). A window enters as one: its first and its last micro-batch have "
        "the same weight, so nothing inside it is stale. Small steps at the same beta forget N times faster in samples."
    )
    own = rows.query("optimizer != 'nesterov'")  # whose buffer is momentum's
    caption = "Half-life: the number of samples after which a weight has halved. Predicted: samples per step x ln 2 / -ln beta."
    picture = None
    if len(own):
        picture = Picture(
            "memory",
            optimizers.figure_memory(own),
            "Weight of past micro-batches in the optimizer state over their age in samples: a staircase for windows, a steep "
            "line for small steps, and a line along the staircase for small steps at beta to the 1/N.",
            "Weight in the state over age in samples, newest = 1. Each step of the staircase is a window, each point a "
            "micro-batch.",
        )
    by = "optimizer entry accumulation_steps arm"
    return section("What the state remembers", text, picture, table_by(lives, by, head, columns, caption, folded=True))


def small_steps(material: Material) -> Section | None:
    """The paths of N small steps beside that of one window.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section, or None.
    """
    rows = optimizers.states(material.results)
    paths = optimizers.path_ratios(rows, ORDERED)
    needed(paths)
    chosen = paths.drop_duplicates("optimizer")
    steps = material.read_steps(chosen["trial"]).merge(chosen[["trial", "optimizer"]], on="trial")
    text = (
        f"N small steps and one window, on the same samples. After {ORDERED} windows, the distance to the window's weights, "
        f"relative to how far those have moved, is {number(paths['rate'].median())} when the learning rate alone is divided by "
        f"N, and {number(paths['memory'].median())} with beta^(1/N) as well (medians of {len(paths)} arms; ratio "
        f"{span(paths['ratio'])}). With both settings unchanged, as in a loop that "
        f"forgets to accumulate, it is {number(paths['same'].median())}."
    )
    picture = Picture(
        "paths",
        optimizers.figure_paths(steps),
        "Distance of small steps to the window's path over windows: the same settings far off, the matched rate nearer, matched "
        "rate and memory nearest.",
        "Distance of the weights to those trained with windows, relative to how far these have moved, in float64; one trial per "
        "optimizer, largest N. The lowest line jumps at the short windows that end the epochs: they are one whole step on fewer "
        "samples.",
    )
    return section("N small steps against one window", text, picture)


def _do_i_change_rate_or_momentum(results: Results) -> Advice:
    """Of the experiments on momentum and Adam: state of the accumulated arms, and half-lives in samples."""
    parts = [part for name in ("momentum", "adam") if (part := results.of(name)).has("optimizer_states")]
    needed(parts)
    right = pd.concat([optimizers.long_runs(part, 1) for part in parts])
    error = optimizers.largest_error(right.query("arm == 'accumulated'"), "state_error", "parameter_error")
    return Advice(
        "Do I change learning rate, momentum or β₂?",
        "No, while B = N·b stays what it was",
        f"After up to {int(right['after_steps'].max())} steps, optimizer state and weights differ from the large batch's "
        f"by at most {number(error)}",
        "When one step takes N times more samples than before, a momentum β remembers N times more samples: β^N keeps the memory "
        "(0.9 → 0.43 at N = 8). Tune the learning rate again.",
        "momentum",
    )


EXPERIMENT = Experiment(
    title="Does accumulation disturb momentum, and what does a small batch do to it?",
    question="Do momentum and other optimizer states depend on the micro-batches: on their number, order or age? And if N small "
    "steps replace one accumulated step, what has to change for the same training?",
    prediction="Under correct accumulation, state and weights equal the full batch's up to rounding, in any order of the "
    "micro-batches. Small steps differ, because beta acts once per step: its half-life in samples shrinks N-fold, and beta^(1/N) "
    "restores it.",
    rule="All arms of a trial run in float64 on the same windows from the same weights. Equal means within "
    f"{ALGEBRA_GATE:.0e} after {LONG} steps ({ORDERED} for orders). It counts only if small-batch training and a planted fault "
    f"(state advanced per micro-batch) differ by {APART:.0e} or more in the same trials. Comparisons of losses are paired by "
    "seed, and hold for this model and length.",
    claims=(older_micro_batches, coupled_in_time, states_evolve_otherwise, memory_in_samples),
    advice=_do_i_change_rate_or_momentum,
    sections=(states, _order, memory, small_steps),
)
