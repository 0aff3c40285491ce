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
from accumulation_harness.analysis import load
from accumulation_harness.analysis.notebook import find_results, show

COMMAND = "accumulation-harness run +experiment=momentum hydra.sweeper.size=quick"
RESULTS = find_results("momentum", "adam", command=f"{COMMAND}` and `{COMMAND.replace('momentum', 'adam')}")

# %% [markdown]
# ## What their pages say

# %%
show(RESULTS, "momentum")
show(RESULTS, "adam")

# %% [markdown]
# ## And what they are made of
#
# Relative differences to the full batch, largest over all steps so far. Arms that have to differ are beside those that must not.

# %%
states = load.read(RESULTS, "momentum").study("optimizer_states")
states.groupby(["optimizer", "arm", "after_steps"])[["gradient_error", "parameter_error"]].max()
