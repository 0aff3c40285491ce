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
from accumulation_harness.analysis import ledger, load
from accumulation_harness.analysis.figures.style import Shown
from accumulation_harness.analysis.notebook import find_results
from accumulation_harness.analysis.question import registered
from accumulation_harness.experiments.batchnorm import sections as batch_norm
from accumulation_harness.experiments.batchnorm.tables import EXACT, exact_rows, expected_momentum

RESULTS = find_results("batchnorm", command="accumulation-harness run +experiment=batchnorm hydra.sweeper.size=quick")
results = load.read(RESULTS, "batchnorm")

# %% [markdown]
# ## What the claims come to
#
# Each by the rule that is fixed in `experiments/batchnorm.py`.

# %%
for name, finding in ledger.findings(registered()["batchnorm"], results).items():
    print(f"{name}: {finding.verdict} (n = {finding.n}). {finding.explanation}\n")

# %% [markdown]
# ## The gradient over b, at fixed B
#
# Same weights, same window, float64. `oracle_error` is the distance to a full batch that normalises in the same chunks (Ghost
# BatchNorm): nothing else is left of the difference.

# %%
rows = results.study(EXACT)
rows = rows[(rows["norm"] == "batch") & (rows["momentum"] == 0.1)]
Shown(batch_norm.figure_gradient_over_b(rows))

# %%
plain = exact_rows(results, "accumulated")
plain.groupby(["after_steps", "micro_batch"])[["gradient_error", "bias", "spread", "oracle_error", "influence"]].median()

# %% [markdown]
# ## The running statistics: an effective momentum of 1 - (1 - m)^N

# %%
every = exact_rows(results, "accumulated", all_momenta=True)
corrected = exact_rows(results, "corrected_momentum", all_momenta=True)
Shown(batch_norm.figure_effective_momentum(every, corrected))

# %%
every.assign(formula=expected_momentum(every)).groupby(["momentum", "accumulation_steps"])[
    ["effective_momentum", "formula"]
].mean()

# %% [markdown]
# ## Remedies side by side
#
# `gradient_error`: distance to the full batch's BatchNorm gradient. `split_error`: distance to the same arm at N = 1.

# %%
own = rows[(rows["after_steps"] == 0) & (rows["micro_batch"] == rows["micro_batch"].min())]
own.groupby("arm")[["gradient_error", "split_error", "statistics_error", "effective_momentum", "forwards"]].median()
