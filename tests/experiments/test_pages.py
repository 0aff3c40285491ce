"""Sections that are made of step rows, which are not kept: from tiny trials of their questions."""

import pandas as pd
import pytest

from accumulation_harness.analysis import report
from tests.slow import few
from tests.trials import stored, trial

MLP = "workload.model=mlp workload.width=2 precision=float64 accumulation_steps=[4] optimizer.name=momentum optimizer.lr=0.02"
ADAM = "optimizer.name=adam optimizer.lr=0.002"
# question -> its trials, what its page then shows, and the verdicts of its claims
TINY = {
    "momentum": (
        ("study=optimizer_states steps=50", f"study=optimizer_memory steps=3 {ADAM}",
         "study=batch_sizes effective_batch=60 accumulation_steps=[12] steps=4"),
        ("What the state remembers", "The order inside a window", "N small steps against one window"),
        {"C1": "conditional", "C10": "confirmed"},
    ),
    "adam": (
        (f"study=optimizer_states steps=200 effective_batch=16 {ADAM}",),
        ("State and weights over 200 steps",), {"C3": "refuted"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", few({*TINY} - {"adam"}, TINY))
def test_the_page_of_tiny_trials(name, tmp_path):
    trials, shown, verdicts = TINY[name]
    for changes in trials:
        stored(tmp_path / "results", trial(MLP, f"experiment={name}", changes))
    page = (report.write(tmp_path / "results", tmp_path / "out").parent / f"pages/{name}.html").read_text()
    assert all(title in page for title in shown) and "A section that is missing" not in page
    claims = pd.read_csv(tmp_path / "out" / "claims.csv", index_col="id")
    assert claims.loc[[*verdicts], "verdict"].to_dict() == verdicts
