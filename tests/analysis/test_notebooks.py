"""The notebooks run from top to bottom on results of real, tiny sweeps."""

import os
import runpy

import pytest

from accumulation_harness.analysis.notebook import NoResults
from tests.commands import ROOT, harness

NOTEBOOKS = sorted((ROOT / "analysis" / "notebooks").glob("*.py"))
# The sweeps that a notebook asks for, cut down.
TINY_MLP = "hydra.sweeper.size=quick workload=digits_mlp tracking=disabled"
SWEEPS = {
    "batch_norm": [f"+experiment=batchnorm {TINY_MLP} steps=2 accumulation_steps=[2,8]"],
    "momentum_and_adam": [
        f"+experiment=momentum {TINY_MLP} optimizer=momentum",
        f"+experiment=adam {TINY_MLP} seed=0 study=adam_scale optimizer.eps=1e-8",
    ],
    "my_own_sweep": ["-m norm=none,batch seed=0,1 steps=3 algebra_steps=2 accumulation_steps=[2,16]"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


def make_results(notebook, folder):
    for sweep in SWEEPS[notebook.stem]:
        harness("run", *sweep.split(), f"results={folder / 'results'}")


def test_a_notebook_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("HARNESS_RESULTS", "elsewhere")
    with pytest.raises(NoResults, match=r"batchnorm in elsewhere; run `accumulation-harness run \+experiment=batchnorm"):
        runpy.run_path(str(ROOT / "analysis/notebooks/batch_norm.py"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_in_jupyter(notebook, folder):
    """As a user opens it: converted by jupytext and executed in a kernel; at least one figure or table is shown."""
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    make_results(notebook, folder)
    below = folder / "below"
    below.mkdir(exist_ok=True)
    book = jupytext.read(notebook)
    os.environ["PYTHONPATH"] = f"{ROOT}/harness"
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(below)}}).execute()
    kinds = {kind for cell in book.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert {"text/html", "image/svg+xml"} <= kinds
