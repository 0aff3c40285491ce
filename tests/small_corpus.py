"""A folder of functions with docstrings: 8 modules of 8, whose texts share words with their own source."""

import pytest

from tests.trials import trial

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


def config(root, *settings):
    """A trial on it: 48 pairs to train on and 16 held out."""
    own = "workload.data=docstrings workload.model=towers workload.width=4 effective_batch=12 accumulation_steps=[4] seed=3"
    return trial(own, f"optimizer.name=adam optimizer.lr=0.003 data.root={root}", *settings)
