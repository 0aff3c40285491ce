# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Momentum and Adam
#
# What accumulation does to the optimizer's state (nothing), what small steps do instead, and what Adam hides.
# Make the results first: `accumulation-harness run +experiment=momentum` and `accumulation-harness run +experiment=adam`
# (`hydra.sweeper.size=quick` for a small part of them).

# %%
from accumulation_harness.analysis import ledger, load
from accumulation_harness.analysis.figures.style import Shown
from accumulation_harness.analysis.notebook import find_results
from accumulation_harness.analysis.question import registered
from accumulation_harness.experiments.momentum import figures as optimizer_figures
from accumulation_harness.experiments.momentum import states as optimizers

COMMAND = "accumulation-harness run +experiment=momentum hydra.sweeper.size=quick"
RESULTS = find_results("momentum", "adam", command=f"{COMMAND}` and `{COMMAND.replace('momentum', 'adam')}")
results = load.read(RESULTS, "momentum")

# %% [markdown]
# ## What the claims come to

# %%
for experiment in ("momentum", "adam"):
    for name, finding in ledger.findings(registered()[experiment], load.read(RESULTS, experiment)).items():
        print(f"{name}: {finding.verdict} (n = {finding.n}). {finding.explanation}\n")

# %% [markdown]
# ## State and weights, in float64
#
# Relative differences to the full batch, largest over all steps so far. Arms that have to differ are beside those that must not.

# %%
states = optimizers.states(results)
states.groupby(["optimizer", "arm", "after_steps"])[["gradient_error", "state_error", "parameter_error"]].max()

# %%
first = states[states["workload"] == "digits"].drop_duplicates("optimizer")
steps, _ = load.steps(RESULTS, "momentum", first["trial"])
Shown(optimizer_figures.figure_states(steps.merge(first[["trial", "optimizer"]], on="trial")))

# %% [markdown]
# ## What the state remembers
#
# The weight of every past micro-batch in the state, over its age in samples. A window is one step of a staircase: nothing in it
# is stale. Small steps forget N times faster, unless beta becomes beta^(1/N).

# %%
memory = results.study("optimizer_memory")
Shown(optimizer_figures.figure_memory(memory))

# %%
lives = optimizers.half_lives(memory)
lives.groupby(["arm", "accumulation_steps", "entry"])[["half_life", "predicted"]].median()
