# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # BatchNorm
#
# What the batch statistics do to an accumulated gradient, what the running statistics do, and what the remedies mend.
# Make the results first: `accumulation-harness run +experiment=batchnorm` (`hydra.sweeper.size=quick` for a small part of them).

# %%
from accumulation_harness.analysis import load
from accumulation_harness.analysis.notebook import find_results, show

RESULTS = find_results("batchnorm", command="accumulation-harness run +experiment=batchnorm hydra.sweeper.size=quick")

# %% [markdown]
# ## What its page says
#
# The claims by rules that were fixed before, the figures and the tables.

# %%
show(RESULTS, "batchnorm")

# %% [markdown]
# ## And what it is made of
#
# A row for each measurement. `gradient_error`: distance to the full batch's gradient, relative, in float64; `oracle_error`: to
# that of a full batch which normalises in the same chunks (Ghost BatchNorm); `split_error`: to the same arm at N = 1.

# %%
rows = load.read(RESULTS, "batchnorm").study("batch_statistics").query("norm == 'batch' and momentum == 0.1")
rows.groupby(["arm", "micro_batch"])[["gradient_error", "split_error", "oracle_error", "effective_momentum"]].median()
