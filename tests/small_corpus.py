"""A folder of functions with docstrings: 8 modules of 8, whose texts share words with their own source."""

import pytest

from accumulation_harness.config import Data, DataConfig, Model, OptimizerConfig, OptimizerName, TrialConfig, WorkloadConfig

NOUNS = ("matrix", "letter", "folder", "socket", "window", "signal", "archive", "lattice")
VERBS = ("invert", "scatter", "compress", "validate", "reorder", "measure", "publish", "discard")


def function(verb, noun):
    """A function of four lines."""
    return (
        f'def {verb}_{noun}(given, scale=1):\n    """{verb.capitalize()} the {noun} that is given, by its {noun} scale.\n\n'
        f'    Not read.\n    """\n    {noun} = list(given)\n    return [{verb}(one, scale) for one in {noun}]\n\n\n'
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The folder's name."""
    folder = tmp_path_factory.mktemp("corpus")
    for noun in NOUNS:
        (folder / f"{noun}.py").write_text("".join(function(verb, noun) for verb in VERBS))
    return str(folder)


def config(root, **changes):
    """A trial on it: 48 pairs to train on and 16 held out; `changes` to the workload or the trial."""
    own = {name: changes.pop(name) for name in ("dropout", "contrast", "penalty") if name in changes}
    workload = WorkloadConfig(data=Data.docstrings, model=Model.towers, width=4, **own)  # type: ignore[arg-type]
    settings = {
        "effective_batch": 12, "accumulation_steps": (4,), 
        "optimizer": OptimizerConfig(name=OptimizerName.adam, lr=0.003), "seed": 3,
    }  # fmt: skip
    return TrialConfig(workload=workload, data=DataConfig(root=root), **{**settings, **changes})  # type: ignore[arg-type]
