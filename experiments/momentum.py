"""Does accumulation disturb momentum? And what changes when N small steps replace one window?"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from analysis import optimizers
from analysis.content import Picture, Section, Table, Text, number
from analysis.figures import optimizers as figures
from analysis.load import Results
from analysis.optimizers import of_study
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided
from harness.judge import statistics

# Float64 trajectories of correct code differ by a few 1e-15 (docs/equivalence.md), faults by 1e-3 and more: the gate of L0 and,
# nine decades above it, what has to be visible for the comparison to mean anything.
SAME = 1e-12
APART = 1e-3
LONG = 200  # optimizer steps of C3
ORDERED = 50  # of C1 and C2
HALF_LIFE_ERROR = 1e-9  # relative; the fit is exact but for rounding times the condition of the gradients, below 1e3 here
CLOSER = 2.0  # times nearer to the window's path: the matched memory against the matched rate alone
LEAST_SEEDS = 5  # of the comparison of Adam's beta2


# Rules -------------------------------------------------------------------------------------------------------------------------


def states_evolve_otherwise(results: Results) -> ClaimResult:
    """C3: optimizer state and weights of every accumulated arm after 200 steps, beside arms that have to differ."""
    rows = long_runs(results)
    right = rows[rows["arm"] == "accumulated"]
    small = rows[rows["arm"] == "small_steps"]
    fault = rows[(rows["arm"] == "optimizer_state_per_micro_batch") & (rows["optimizer"] != "sgd")]
    if right.empty or small.empty:
        return undecided(f"It takes trajectories of {LONG} steps.", len(right))
    worst = _largest(right, ("state_error", "parameter_error"))
    least = _least_apart(pd.concat([small, fault]))
    if not least >= APART:
        return undecided("An arm that has to differ did not: the comparison could not have seen it.", len(right))
    return ClaimResult(
        verdict=Ruling.refuted if worst <= SAME else Ruling.confirmed,
        measured=worst,
        threshold=f"≤ {SAME:.0e}; must differ by ≥ {APART:.0e}",
        n=len(right),
        explanation=f"After {LONG} float64 steps of {', '.join(sorted(set(right['optimizer'])))}, state and weights of "
        f"{len(right)} accumulated arms are the full batch's to {number(worst)}; small-batch training and state advanced per "
        f"micro-batch are off by {number(least)} or more.",
    )


def long_runs(results: Results) -> pd.DataFrame:
    """Every arm after 200 steps or more, where nothing but the gradient passes from sample to sample."""
    rows = of_study(results, "optimizer_states")
    return rows[(rows["after_steps"] >= LONG) & _plain(rows)]


def _largest(rows: pd.DataFrame, columns: Iterable[str]) -> float:
    """Over all rows and columns; an optimizer without state has none, anything else that is not a number is infinitely far."""
    values = rows.assign(state_error=rows["state_error"].where(rows["optimizer"] != "sgd", 0.0))
    return float(values[list(columns)].astype(float).fillna(math.inf).to_numpy().max())


def _least_apart(rows: pd.DataFrame) -> float:
    """The smallest difference among arms that have to differ: of the state, and of the weights where there is none."""
    error = rows["state_error_now"].where(rows["optimizer"] != "sgd", rows["parameter_error_now"])
    return float(error.astype(float).fillna(math.inf).min())


def _orders(results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Arms whose micro-batches came in another order, after 50 steps; and small steps in another order, which have to differ."""
    rows = of_study(results, "optimizer_states")
    rows = rows[rows["after_steps"] == ORDERED]
    return rows[rows["arm"] == "reordered"], rows[rows["arm"] == "small_steps_reordered"]


def _plain(rows: pd.DataFrame) -> pd.Series[bool]:
    """Nothing but the gradient passes from sample to sample."""
    return (rows["norm"] != "batch") & (rows["dropout"] == 0)


def older_micro_batches(results: Results) -> ClaimResult:
    """C1: no order inside the window is felt, and every micro-batch of a window has the same weight in the momentum."""
    reordered, small = _orders(results)
    reordered, small = reordered[_plain(reordered)], small[_plain(small)]
    momentum = reordered[reordered["optimizer"] != "sgd"]
    memory = of_study(results, "optimizer_memory")
    if momentum.empty or memory.empty:
        return undecided("It takes reordered windows and the weights in the state.", len(momentum))
    worst = _largest(reordered, ("state_error", "parameter_error"))
    spread, spread_small = (optimizers.spread_in_window(memory[memory["arm"] == arm]) for arm in ("accumulated", "small_steps"))
    if not (_least_apart(small) >= APART and spread_small.min() >= APART):
        return undecided("Small steps in another order have to differ and did not.", len(momentum))
    cost = float((momentum["loss"] / momentum["loss_against"] - 1).abs().max())
    stale = max(worst, float(spread.max()))
    return ClaimResult(
        verdict=Ruling.refuted if stale <= SAME else Ruling.confirmed,
        measured=stale,
        threshold=f"≤ {SAME:.0e}; must differ by ≥ {APART:.0e}",
        n=len(momentum) + memory["trial"].nunique(),
        explanation=f"Another order inside the window moves state and weights by at most {number(worst)} after {ORDERED} steps "
        f"and the loss by {number(cost)}; first and last micro-batch have the same weight in the state to "
        f"{number(float(spread.max()))}. Under small steps the newest of a window weighs "
        f"{float(spread_small.min()):.0%} or more above the oldest.",
    )


def coupled_in_time(results: Results) -> ClaimResult:
    """C2: only what is carried from one forward to the next couples micro-batches: running statistics, random draws."""
    reordered, small = _orders(results)
    free, bound = reordered[_plain(reordered)], reordered[~_plain(reordered)]
    batch_norm, dropout = bound[bound["norm"] == "batch"], bound[bound["dropout"] > 0]
    if free.empty or batch_norm.empty or dropout.empty:
        return undecided("It takes reordered windows without coupling, with BatchNorm and with dropout.", len(reordered))
    if not _least_apart(small) >= APART:
        return undecided("Small steps in another order have to differ and did not.", len(reordered))
    worst = _largest(free, ("gradient_error", "state_error", "parameter_error"))
    gradients = _largest(batch_norm, ("gradient_error",))
    buffers, draws = float(batch_norm["buffer_error_now"].min()), float(dropout["gradient_error"].min())
    apart = buffers >= APART and draws >= APART
    return ClaimResult(
        verdict=Ruling.confirmed if worst > SAME else Ruling.conditional if apart else Ruling.refuted,
        measured=worst,
        threshold=f"≤ {SAME:.0e} where nothing is carried over",
        n=len(reordered),
        explanation=f"Gradients, state and weights do not feel the order ({number(worst)}), nor do gradients under BatchNorm "
        f"({number(gradients)}). Its running statistics do ({number(buffers)} or more), and so do dropout's draws "
        f"({number(draws)}).",
    )


def memory_in_samples(results: Results) -> ClaimResult:
    """C10: half-lives in samples, the path of the weights under matched memory, and (where run) Adam's beta2 at small b."""
    lives = optimizers.half_lives(of_study(results, "optimizer_memory"))
    paths = optimizers.path_ratios(of_study(results, "optimizer_states"), ORDERED)
    if lives.empty or paths.empty:
        return undecided("It takes the weights in the state and paths of small steps.", len(lives))
    error = float((lives["half_life"] / lives["predicted"] - 1).abs().max())
    matched = lives.pivot_table(index=["trial", "accumulation_steps", "entry"], columns="arm", values="half_life")
    off = float((matched["small_steps_memory"] / matched["accumulated"] - 1).abs().max())
    shortened = matched["accumulated"] / matched["small_steps"]
    nearest = float(paths["ratio"].min())
    sentences = [
        f"The half-life of the state is that of beta times the samples of a step (to {number(error)}): small steps at the same "
        f"beta remember {number(shortened.min())} to {number(shortened.max())} times fewer samples, at beta^(1/N) as many.",
        f"With the memory matched, {len(paths)} paths of small steps are {number(nearest)} times or more nearer to the window's "
        "than with the rate alone.",
    ]
    adam = beta2_differences(results)
    sentences += _beta2_in_words(adam)
    holds = error <= HALF_LIFE_ERROR and off <= HALF_LIFE_ERROR and nearest >= CLOSER
    return ClaimResult(
        verdict=Ruling.confirmed if holds else Ruling.refuted if nearest < 1 else Ruling.conditional,
        measured=nearest,
        threshold=f"≥ {CLOSER:g} times nearer; half-lives within {HALF_LIFE_ERROR:.0e}",
        n=len(lives) + len(paths),
        explanation=" ".join(sentences),
    )


def _beta2_in_words(differences: pd.DataFrame) -> list[str]:
    if len(differences) < LEAST_SEEDS:
        return []
    means = {name: statistics.mean_interval(list(differences[name])) for name in differences}
    words = {
        name: f"{number(one.estimate)} ({number(one.low)} to {number(one.high)}, n = {len(differences)})"
        for name, one in means.items()
    }
    return [
        f"Adam at b = 2, loss under beta2 less that under beta2^(1/N): training, at the same rate, {words['training']}; "
        f"held-out, each at its best rate, {words['held_out']}."
    ]


def beta2_differences(results: Results) -> pd.DataFrame:
    """Loss under the window's beta2 less that under beta2^(1/N), at small b, one row per seed: above 0 the rule helps.

    `training`: of the last tenth, mean over the learning rates; `held_out`: each beta2 at its best rate.
    """
    rows = beta2_trials(results)
    best = optimizers.at_best_rate(rows, ["beta2"])
    if rows["beta2"].nunique() < 2 or best["beta2"].nunique() < 2:
        return pd.DataFrame(columns=["training", "held_out"], dtype=float)
    training = rows.groupby(["seed", "beta2"])["tail_loss"].mean().unstack()
    held_out = best.pivot(index="seed", columns="beta2", values="held_out_loss")
    fixed, matched = training.columns.min(), training.columns.max()
    columns = {"training": training[fixed] - training[matched], "held_out": held_out[fixed] - held_out[matched]}
    return pd.DataFrame(columns).dropna()


def beta2_trials(results: Results) -> pd.DataFrame:
    rows = of_study(results, "batch_sizes")
    return rows[(rows["optimizer"] == "adam") & (rows["accumulation_steps"] > 1)]


CLAIMS = (
    Claim(
        id="C1",
        expects=Ruling.refuted,
        rule=f"Refuted when another order of the micro-batches, after {ORDERED} float64 steps, moves state and weights by at "
        f"most {SAME:.0e}, every micro-batch of a window has the same weight in the state to {SAME:.0e}, and small steps feel "
        f"both.",
        decide=older_micro_batches,
    ),
    Claim(
        id="C2",
        expects=Ruling.conditional,
        rule="Conditional when no order is felt in gradients, state or weights, but in running statistics and random draws.",
        decide=coupled_in_time,
    ),
    Claim(
        id="C3",
        expects=Ruling.refuted,
        rule=f"Refuted when state and weights of every accumulated arm are the full batch's to {SAME:.0e} after {LONG} float64 "
        f"steps, and small-batch training and state advanced per micro-batch are off by {APART:.0e} or more.",
        decide=states_evolve_otherwise,
    ),
    Claim(
        id="C10",
        expects=Ruling.confirmed,
        rule=f"Confirmed when measured half-lives are those of beta times the samples of a step, beta^(1/N) restores the "
        f"brings the path of N small steps {CLOSER:g} times nearer to the window's in every trial. What Adam's beta2 does to the "
        "loss at b = 2 is reported beside it.",
        decide=memory_in_samples,
    ),
)


# Page --------------------------------------------------------------------------------------------------------------------------


def states(material: Material) -> Section | None:
    return optimizers.states_section(material, long_runs(material.results))


def order(material: Material) -> Section | None:
    rows = of_study(material.results, "optimizer_states")
    rows = rows[(rows["after_steps"] == ORDERED) & rows["arm"].isin(["reordered", "small_steps_reordered"])]
    if rows.empty:
        return None
    head = ("model", "dropout", "arm", "n", "gradient", "state", "weights", "running statistics")
    cells = []
    for (model, dropout, arm), own in rows.groupby([rows["workload"] + " " + rows["norm"], "dropout", "arm"]):
        errors = (own[name].max() for name in ("gradient_error", "state_error", "parameter_error", "buffer_error"))
        cells.append((str(model), f"{dropout:g}", figures.LABELS[str(arm)], str(len(own)), *map(number, errors)))
    caption = (
        f"The micro-batches of every window in another order, each with its own samples, {ORDERED} float64 steps; largest "
        f"relative difference to the usual order, over trials and N. Small steps show that the order was another one."
    )
    return Section("The order inside a window", (Table(head, tuple(cells), caption),))


def memory(material: Material) -> Section | None:
    rows = of_study(material.results, "optimizer_memory")
    if rows.empty:
        return None
    lives = optimizers.half_lives(rows)
    head = ("optimizer", "state", "arm", "N", "half-life in samples", "predicted", "largest relative error", "n")
    cells = tuple(
        (str(optimizer), str(entry), figures.LABELS[str(arm)], str(num), number(own["half_life"].median()),
         number(own["predicted"].median()), number((own["half_life"] / own["predicted"] - 1).abs().max()), str(len(own)))
        for (optimizer, entry, num, arm), own in lives.groupby(["optimizer", "entry", "accumulation_steps", "arm"])
    )  # fmt: skip
    text = Text(
        "The state was taken apart into the gradients of all micro-batches seen so far (least squares at weights that stand "
        f"still; largest residual {number(rows['residual'].max())}). A window enters as one: its first and its last micro-batch "
        f"have the same weight, so nothing inside it is stale. Small steps at the same beta forget N times faster in samples."
    )
    picture = Picture(
        "memory",
        figures.figure_memory(rows),
        "Weight of past micro-batches in the optimizer state over their age in samples: a staircase for windows, a steep line "
        "for small steps, and a line along the staircase for small steps at beta to the 1/N.",
        "Weight in the state over age in samples, newest = 1. Steps of the staircase are windows; a point is a micro-batch.",
    )
    caption = "Half-life: samples after which a weight has halved; predicted: samples per step x ln 2 / -ln beta."
    return Section("What the state remembers", (text, picture, Table(head, cells, caption, folded=True)))


def small_steps(material: Material) -> Section | None:
    rows = of_study(material.results, "optimizer_states")
    paths = optimizers.path_ratios(rows, ORDERED)
    if paths.empty:
        return None
    chosen = paths.drop_duplicates("optimizer")
    steps = material.read_steps(chosen["trial"]).merge(chosen[["trial", "optimizer"]], on="trial")
    text = Text(
        f"N small steps against one window, on the same samples. After {ORDERED} windows, the distance to the window's weights "
        f"(over how far those have moved) is {number(paths['rate'].median())} with the learning rate over N alone and "
        f"{number(paths['memory'].median())} with beta^(1/N) as well (medians of {len(paths)} arms; ratio "
        f"{number(paths['ratio'].min())} to {number(paths['ratio'].max())}). Keeping both settings, as a loop that forgets to "
        f"accumulate does, ends {number(paths['same'].median())} away."
    )
    picture = Picture(
        "paths",
        figures.figure_paths(steps),
        "Distance of small steps to the window's path over windows: the same settings far off, the matched rate nearer, matched "
        "rate and memory nearest.",
        "Distance of the weights to those of the window's training, over the distance these have come, float64; one trial per "
        "optimizer, largest N. The jumps of the lowest line are the short windows at the ends of epochs: one whole step for "
        "fewer samples.",
    )
    table = optimizers.equal_table(material.results)
    return Section("N small steps against one window", (text, picture, table) if table else (text, picture))


def beta2(material: Material) -> Section | None:
    rows = beta2_trials(material.results)
    if rows.empty or rows["beta2"].nunique() < 2:
        return None
    differences = beta2_differences(material.results)
    text = Text(
        f"The rule of arXiv 2507.07101, beta2* = beta2^(B*/B), at b = {int(rows['batch'].iloc[0])} against the beta2 of a window "
        f"of {int(rows['effective_batch'].iloc[0])}. {' '.join(_beta2_in_words(differences))} "
        f"Training: {optimizers.power(list(differences['training']))} Held-out: "
        f"{optimizers.power(list(differences['held_out']))} The paper's loss is that of unseen text in a single epoch; here the "
        f"training loss comes nearest to it, and 297 held-out digits are few. Direction only: a perceptron on 1,500 digits for "
        f"four epochs says nothing of the size elsewhere."
    )
    picture = Picture(
        "beta2",
        figures.figure_rates(rows, "beta2", lambda value: f"β₂ = {value:.4g}", ("tail_loss", "held_out_loss")),
        "Training and held-out loss over learning rate for the two values of beta2 at small batch.",
        "Loss over the learning rate after four epochs, mean and 95% interval over seeds. Training: the last tenth of the "
        "windows.",
    )
    return Section("Adam's second moment at a small batch", (text, picture))


EXPERIMENT = Experiment(
    name="momentum",
    title="Does accumulation disturb momentum, and what does when the batch is small instead?",
    question="Do momentum and its kind see anything of the micro-batches: their number, their order, their age? And if N small "
    "steps are taken instead of one accumulated step, what has to change for the same training?",
    prediction="Under correct accumulation state and weights are the full batch's to rounding, in any order of the "
    "micro-batches. Small steps differ, because a beta counts steps: its half-life shrinks N-fold in samples, and beta^(1/N) "
    "restores it.",
    rule=f"Float64, the same windows and start for all arms of a trial. Equal means {SAME:.0e} after {LONG} ({ORDERED} for "
    f"orders) steps, and counts only if small-batch training and a planted fault (state advanced per micro-batch) are seen at "
    f"{APART:.0e} or more in the same trials. Convergence is paired by seed; what it finds holds for this model and length.",
    claims=CLAIMS,
    sections=(states, order, memory, small_steps, beta2),
)
