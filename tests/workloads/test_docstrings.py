import os
import platform

import numpy as np
import pytest

from accumulation_harness.config import ConfigError
from accumulation_harness.config.validation import validate
from accumulation_harness.workloads.docstrings import HELD_OUT, pairs_of, read_pairs
from tests.small_corpus import NOUNS, corpus, function
from tests.trials import trial

__all__ = ["corpus"]
# Of the standard library and numpy in these versions; others have other pairs, and other results.
KNOWN = {("3.11.7", "2.4.6"): "519a45c9c0d830608ea50a331da28baf4a229cbc710f17649c8c7ef8c91f728a"}


def test_a_pair_is_the_first_paragraph_and_the_source_without_it():
    (found,) = pairs_of("m", function("invert", "matrix").encode())
    assert found.query == "Invert the matrix that is given, by its matrix scale."
    assert found.passage == (
        "def invert_matrix(given, scale=1): matrix = list(given) return [invert(one, scale) for one in matrix]"
    )


@pytest.mark.parametrize("content", [b"def f(:", b"\xff\xfe", b'def f():\n    """Too short."""\n    return 1\n', b"x = 1\n"])
def test_what_has_no_pair_gives_none(content):
    assert list(pairs_of("m", content)) == []


def test_modules_are_held_out_whole(corpus):
    pairs = read_pairs(corpus)
    train, held_out = ({pair.module for pair in part} for part in (pairs.train, pairs.held_out))
    assert train | held_out == set(NOUNS) and not train & held_out
    assert (len(pairs.train), len(pairs.held_out)) == (48, 16)


@pytest.mark.slow
def test_the_embedded_pairs_are_those_of_these_versions():
    pairs = read_pairs(None)
    train, held_out = ({pair.module for pair in part} for part in (pairs.train, pairs.held_out))
    assert len(pairs.held_out) == HELD_OUT and len(pairs.train) > 4000 and not train & held_out
    queries = [pair.query.lower() for part in (pairs.train, pairs.held_out) for pair in part]
    assert len(set(queries)) == len(queries)
    versions = platform.python_version(), np.__version__
    if versions not in KNOWN:
        pytest.skip(f"nobody has noted the pairs of Python {versions[0]} and numpy {versions[1]}")
    assert pairs.fingerprint == KNOWN[versions]


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_has_no_end_is_no_source(what, tmp_path):
    if what == "pipe":
        os.mkfifo(tmp_path / "b.py")
    else:
        (tmp_path / "b.py").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a readable b\.py \(Not a regular file\)"):
        read_pairs(str(tmp_path))


def test_an_address_is_refused_and_its_password_told_to_nobody():
    with pytest.raises(ConfigError, match="expected a local folder") as caught:
        validate(trial("workload.data=docstrings workload.model=towers data.root=https://me:s3cret@host/mnist"))
    assert "s3cret" not in repr(caught.value)
