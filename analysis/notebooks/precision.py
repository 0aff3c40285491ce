# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {name: python3, display_name: Python 3, language: python}
# ---

# %% [markdown]
# # Precision
#
# What number formats do to an accumulated gradient: the format of the sum, the loss scale, the forward in 16 bits.
# Make the results first: `accumulation-harness run +experiment=precision` (`hydra.sweeper.size=quick` for a small part of them).

# %%
from accumulation_harness.analysis import ledger, load, precision
from accumulation_harness.analysis.figures import precision as precision_figures
from accumulation_harness.analysis.figures.style import Shown
from accumulation_harness.analysis.notebook import find_results
from accumulation_harness.analysis.question import registered

RESULTS = find_results("precision", command="accumulation-harness run +experiment=precision hydra.sweeper.size=quick")
results = load.read(RESULTS, "precision")

# %% [markdown]
# ## What the claims come to

# %%
for name, finding in ledger.findings(registered()["precision"], results).items():
    print(f"{name}: {finding.verdict} (n = {finding.n}). {finding.explanation}\n")

# %% [markdown]
# ## The sum in 32 and in 16 bits
#
# Relative error of the accumulated gradient against float64, over N at fixed B. In float32 it does not grow; in 16 bits the sum
# swallows what is added to it.

# %%
errors = precision.errors(results.measurements)
errors.groupby(["precision", "accumulator", "accumulation_steps"])[["arm_error", "ratio"]].median().unstack("accumulator")

# %%
panels = {f"forward in {name}": own for name, own in errors.groupby("precision")}
Shown(precision_figures.figure_accumulators(panels))

# %% [markdown]
# ## One overflow in one micro-batch
#
# A right window is skipped once, and its scale halves once. `right` says so, and that the windows beside it are exact.

# %%
scaled = precision.scaling(results.measurements)
scaled.groupby("arm")[["right", "exact", "once"]].mean()
