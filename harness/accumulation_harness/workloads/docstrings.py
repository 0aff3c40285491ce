"""Dense retrieval on real text: a function's docstring is the query, its source is the passage that answers it."""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from accumulation_harness.config import ConfigError, Contrast
from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.files import read_file
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.contrastive import Representations, losses, ranks
from accumulation_harness.workloads.towers import trigrams

QUERY_LENGTH, PASSAGE_LENGTH = 80, 160  # bytes of a text that are read
SHORTEST_QUERY, SHORTEST_PASSAGE = 20, 40  # characters: "Return x." is said of many functions
HELD_OUT = 1000  # pairs, and so passages of the pool; of a small folder a quarter
SPLIT_SEED = 20240601  # of the modules' order; never a trial's seed: all trials train on the same pairs
MAX_BYTES = 100_000_000  # of all files of a folder together
# Not part of a library, or no text that somebody wrote about a function.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "ensurepip", "turtledemo", "pydoc_data", "_vendor"}


@dataclass(frozen=True, order=True)
class Pair:
    """A docstring's first paragraph and the function's source without it, white space made one."""

    module: str
    query: str
    passage: str


@dataclass(frozen=True)
class Pairs:
    """All pairs: those of some modules to train on, those of the others held out."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all texts in order: two machines with the same have the same data."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for pair in part:
                digest.update("\0".join((pair.module, pair.query, pair.passage, "")).encode())
        return digest.hexdigest()


@cache
def read_pairs(root: str | None) -> Pairs:
    """Read pairs of docstring and code of the standard library and numpy, or of a folder.

    Args:
        root: A folder, of which all `*.py` are read; None for the libraries.

    Returns:
        The pairs, those of some modules held out.

    Raises:
        ConfigError: The folder has fewer than two modules with pairs.
    """
    libraries = {"": Path(root)} if root is not None else {"": Path(ast.__file__).parent, "numpy": Path(np.__file__).parent}
    found = [pair for name, folder in libraries.items() for pair in _harvest(name, folder)]
    pairs = _distinct(found)
    modules = sorted({pair.module for pair in pairs})
    if len(modules) < 2:
        raise ConfigError("data.root", root, "a folder with two or more *.py files that have functions with docstrings")
    order = torch.randperm(len(modules), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    wanted, chosen, taken = min(HELD_OUT, len(pairs) // 4), set[str](), 0
    for i in order[:-1]:
        if taken >= wanted:
            break
        chosen.add(modules[i])
        taken += sum(pair.module == modules[i] for pair in pairs)
    train = tuple(pair for pair in pairs if pair.module not in chosen)
    return Pairs(train, tuple(pair for pair in pairs if pair.module in chosen)[: max(wanted, 1)])


def _distinct(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs in order, without those of which a query or a passage, as far as it is read, was there before."""
    queries, passages, kept = set[bytes](), set[bytes](), []
    for pair in sorted(pairs):
        query, passage = pair.query.lower().encode()[:QUERY_LENGTH], pair.passage.lower().encode()[:PASSAGE_LENGTH]
        if query not in queries and passage not in passages:
            kept.append(pair)
        queries.add(query)
        passages.add(passage)
    return kept


def _read(root: str, file: Path, most: int) -> bytes:
    """Content of a regular file of at most `most` bytes; `ConfigError` about `data.root` for any other."""
    try:
        content = read_file(file, most + 1)
    except OSError as error:
        raise ConfigError("data.root", root, f"a readable {file.name} ({error.strerror})") from error
    if len(content) > most:
        raise ConfigError("data.root", root, f"at most {most:,} bytes in {file.name}")
    return content


def _harvest(library: str, folder: Path) -> Iterator[Pair]:
    left = MAX_BYTES
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if LEFT_OUT.intersection(parts[:-1]) or parts[-1].startswith("test"):
            continue
        content = _read(str(folder), path, left)
        left -= len(content)
        yield from pairs_of(".".join([library, *parts] if library else parts), content)


def pairs_of(module: str, content: bytes) -> Iterator[Pair]:
    """The pairs of a file of Python; none of one that cannot be parsed.

    Args:
        module: Its dotted name.
        content: The file.

    Yields:
        Query and passage of each documented function.
    """
    try:
        source = content.decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # an invalid escape in somebody's text
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # not UTF-8, or Python of another version
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or len(node.body) < 2:
            continue
        told = ast.get_docstring(node)
        if not told:
            continue
        text = node.body[0]
        assert text.end_lineno is not None and node.end_lineno is not None
        code = lines[node.lineno - 1 : text.lineno - 1] + lines[text.end_lineno : node.end_lineno]
        query, passage = (" ".join(one.split()) for one in (told.split("\n\n")[0], textwrap.dedent("\n".join(code))))
        if len(query) >= SHORTEST_QUERY and len(passage) >= SHORTEST_PASSAGE:
            yield Pair(module, query, passage)


class DocstringWorkload(Workload):
    """Two towers and a loss with in-batch negatives; one loss term per pair.

    inputs [n, 2, 160] int64 are byte trigrams (`towers.py`) of query and passage; targets are the ids.
    `held_out.ids` go on after the training set's.
    """

    coupling = Cause.non_separable_loss

    def __init__(
        self,
        pairs: Pairs,
        make_model: Callable[[], nn.Module],
        *,
        contrast: Contrast,
        device: torch.device,
    ) -> None:
        self.pairs, self.contrast = pairs, contrast
        self._make_model, self._device = make_model, device
        self.num_samples = len(pairs.train)
        self._train = _texts_of(pairs.train)
        held_out = _texts_of(pairs.held_out)
        self.held_out = self._placed(torch.arange(len(held_out)) + self.num_samples, held_out)

    def make_model(self) -> nn.Module:
        """Two fresh towers."""
        return self._make_model()

    def batch(self, ids: Tensor) -> Batch:
        """The pairs `ids` of the training set."""
        return self._placed(ids, self._train[ids])

    def losses(self, outputs: Representations, batch: Batch) -> Tensor:
        """[n] of `outputs`, whatever rows they have: a memory bank may have added some."""
        return losses(outputs, self.contrast)

    def correct(self, outputs: Representations, batch: Batch) -> Tensor:
        """[n] whether the nearest passage of the batch is the query's own."""
        return (ranks(outputs) == 1).long()

    def _placed(self, ids: Tensor, texts: Tensor) -> Batch:
        return Batch(ids=ids, inputs=texts.to(self._device, non_blocking=True), targets=ids.to(self._device, non_blocking=True))


def _texts_of(pairs: Sequence[Pair]) -> Tensor:
    """[n, 2, 160] int64 trigrams of query and passage."""
    queries, passages = (
        torch.from_numpy(np.stack([trigrams(text, length) for text in texts]))
        for texts, length in (([p.query for p in pairs], QUERY_LENGTH), ([p.passage for p in pairs], PASSAGE_LENGTH))
    )
    return torch.stack([torch.nn.functional.pad(queries, (0, PASSAGE_LENGTH - QUERY_LENGTH)), passages], 1)
