# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # A tour of a sweep
#
# What a sweep leaves behind, and how to get from it to a verdict, a curve and a number with an interval.
# Make the results first: `accumulation-harness run +experiment=equivalence` (or `make report`).

# %%
from accumulation_harness.analysis import load, tables
from accumulation_harness.analysis.figures import common as figures
from accumulation_harness.analysis.figures import style
from accumulation_harness.analysis.figures.style import Shown
from accumulation_harness.analysis.notebook import find_results
from accumulation_harness.judge import statistics

RESULTS = find_results("equivalence", command="accumulation-harness run +experiment=equivalence hydra.sweeper.size=quick")

# %% [markdown]
# ## One row per arm
#
# A trial trains one full batch and its candidates on the same windows from the same weights. Every candidate is an *arm*:
# `accumulated` with N micro-batches, or `permuted`, the full batch with its rows in another order, which has to be equivalent.

# %%
arms = load.from_store(RESULTS, "equivalence")
arms[["workload", "norm", "optimizer", "precision", "seed", "arm", "accumulation_steps", "verdict", "cause"]].head(10)

# %% [markdown]
# ## The verdicts
#
# The worst verdict of every cell, and how many of its trials agree.

# %%
tables.matrix(arms)[["norm", "optimizer", "precision", "arm", "accumulation_steps", "verdict", "cause", "agreeing", "n"]]

# %% [markdown]
# ## Why: the algebra in float64
#
# Correct arms sit near 1e-15, everything else decades above the gate.

# %%
with style.style():
    picture = figures.figure_algebra(arms)
Shown(picture)

# %%
arms[arms["arm"] == "accumulated"].groupby(["norm", "accumulation_steps"])["algebra_error"].agg(["median", "max", "size"])

# %% [markdown]
# ## Loss curves
#
# Step rows stay on disk until they are asked for. `tables.drawn` picks one trial per model and precision.

# %%
chosen = tables.drawn(arms)
rows, missing = load.steps(RESULTS, "equivalence", chosen["trial"])
labels = chosen[["trial", "model", "workload", "norm", "optimizer", "precision", "seed"]]
curves = rows.merge(labels, on="trial")
with style.style():
    picture = figures.figure_losses(curves[curves["precision"] == "float32"])
Shown(picture)

# %% [markdown]
# ## Does it change where training ends?
#
# Paired by seed: the same start, the same batches. Few seeds show little; `detectable` says how little.

# %%
tables.convergence(arms, margin=0.02)[
    ["norm", "optimizer", "precision", "arm", "accumulation_steps", "measure", "n", "mean", "low", "high", "tost_p", "detectable"]
].head(12)

# %%
own = arms[(arms["arm"] == "accumulated") & (arms["norm"] == "batch")]
differences = (own["held_out_loss"] - own["full_held_out_loss"]).tolist()
statistics.mean_interval(differences)
