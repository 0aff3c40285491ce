# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # My own sweep
#
# Run any sweep, for example over two normalisations and three seeds:
#
# ```sh
# accumulation-harness run -m norm=none,batch seed=0,1,2
# ```
#
# then filter, plot and test it here: from the store, or from W&B.

# %%
import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis import load, tables
from accumulation_harness.analysis.content import Picture
from accumulation_harness.analysis.figures import style
from accumulation_harness.analysis.notebook import NoResults, find_results, latest
from accumulation_harness.judge import statistics
from accumulation_harness.results.cells import by_cell, caveats
from accumulation_harness.results.judged_arm import VerdictRow

RESULTS = find_results(command="accumulation-harness run -m norm=none,batch seed=0,1,2")
EXPERIMENT = latest(RESULTS)  # the sweep that was run last; or its name: "single" where it has none
print(f"“{EXPERIMENT}” in {RESULTS}")

# %% [markdown]
# ## Load
#
# `load.from_store` reads the local results. After `accumulation-harness sync`, `load.from_wandb("entity/project", EXPERIMENT)`
# gives the same arms from W&B's server.

# %%
arms = load.from_store(RESULTS, EXPERIMENT)
if arms.empty:
    raise NoResults(f"“{EXPERIMENT}” judges no runs: set EXPERIMENT to the name of a sweep that does")
print(f"{len(arms)} arms")
sorted(set(arms["verdict"]))

# %% [markdown]
# ## The verdicts, and what to do
#
# One row per cell: the worst verdict of its seeds, and how many of them have it. Below, every caveat that the sweep earned, as
# the terminal and the report have it; without one, accumulation was the same computation everywhere.

# %%
judged = [{str(name): value for name, value in row.items()} for row in tables.verdicts(arms).to_dict("records")]
cells = by_cell(VerdictRow(**row) for row in judged)
table = pd.DataFrame([vars(cell) for cell in cells])
table[["workload", "norm", "optimizer", "precision", "arm", "accumulation_steps", "verdict", "cause", "agreeing", "trials"]]

# %%
for caveat in caveats(cells):
    print(f"{caveat}\n")

# %% [markdown]
# ## Filter
#
# An arm is a row: filter it as any table.

# %%
different = arms[arms["verdict"] == "different"]
different[["norm", "seed", "accumulation_steps", "cause", "explained", "reasons"]].head()

# %% [markdown]
# ## Plot
#
# Held-out loss of every accumulated arm beside its own full batch.

# %%
accumulated = arms[arms["arm"] == "accumulated"].assign(gap=lambda own: own["held_out_loss"] - own["full_held_out_loss"])
with style.style():
    figure: Figure = style.new_figure(7, 3)
    axes = figure.subplots()
    for norm, own in accumulated.groupby("norm"):
        axes.plot(own["accumulation_steps"], own["gap"], "o", label=str(norm), alpha=0.6)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="accumulation steps N", ylabel="held-out loss - full batch's (nats)")
    axes.legend(title="norm", frameon=False)
Picture("gap", figure, "Held-out loss over N, less the full batch's", "")

# %% [markdown]
# ## Test
#
# Fix the margin before you look. TOST asks whether the mean difference is *inside* it; the interval says where it is. Seeds are
# the sample: one number per seed, here the mean over N.

# %%
MARGIN = 0.02  # nats
for norm, own in accumulated.groupby("norm"):
    by_seed = own.groupby("seed")["gap"].mean().tolist()
    interval = statistics.mean_interval(by_seed)
    p = statistics.equivalence_p(by_seed, MARGIN)
    print(f"{norm}: {interval.estimate:+.4f} ({interval.low:+.4f} to {interval.high:+.4f}), n = {len(by_seed)}, TOST p = {p:.3g}")

# %% [markdown]
# ## Step by step
#
# Every optimizer step of every arm: loss, distance of the gradient and of the parameters to the full batch's.

# %%
rows, _ = load.steps(RESULTS, EXPERIMENT, sorted(set(arms["trial"]))[:1])
rows.pivot_table(index="step", columns=["arm", "accumulation_steps"], values="parameter_distance", aggfunc="max").tail()
