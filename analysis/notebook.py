"""What a notebook needs beside tables and figures: the results, wherever Jupyter was started, or the command that makes them."""

from __future__ import annotations

import os
from pathlib import Path

from pandas import DataFrame

from accumulation_harness.analysis import load
from accumulation_harness.analysis.article import articles
from accumulation_harness.analysis.content import Picture, Table, Text
from accumulation_harness.results.store import State, Store

VARIABLE = "HARNESS_RESULTS"


class NoResults(RuntimeError):
    """There are no finished trials to show; the message has the command that makes them."""


def find_results(*experiments: str, command: str) -> Path:
    """Find the store that has finished trials: `$HARNESS_RESULTS`, else `results` here or in a folder above.

    Args:
        experiments: Names of the experiments whose trials are wanted.
        command: What makes them.

    Returns:
        The folder of the store.

    Raises:
        NoResults: It says what is missing, where it was looked for, and that `command` makes it.
    """
    named = os.environ.get(VARIABLE)
    here = Path.cwd()
    places = [Path(named)] if named else [folder / "results" for folder in (here, *here.parents)]
    for store in places:
        if store.is_dir() and not unfinished(store, experiments):
            return store
    found = next((store for store in places if store.is_dir()), None)
    what = ", ".join(unfinished(found, experiments) if found else experiments)
    where = f"in {found}" if found else f"in {places[0]}" + ("" if named else " or a folder `results` above")
    raise NoResults(f"no finished trials of {what} {where}; run `{command}`, or set {VARIABLE} to the folder that has them")


def latest(store: Path) -> str:
    """The experiment of the trial that was finished last: the sweep that one has just run.

    Args:
        store: The folder of the store.

    Returns:
        Its name.

    Raises:
        NoResults: The store has no finished trial.
    """
    finished = [status for status in Store(store).status() if status.state == State.finished]
    if not finished:
        raise NoResults(f"no finished trials in {store}; run `accumulation-harness run -m norm=none,batch seed=0,1,2`")
    return max(finished, key=lambda status: (status.folder / "trial.json").stat().st_mtime).experiment


def unfinished(store: Path, experiments: tuple[str, ...]) -> list[str]:
    """List the experiments without a finished trial.

    Args:
        store: The folder of the store.
        experiments: Their names.

    Returns:
        Names.
    """
    return [name for name in experiments if not any(s.state == State.finished for s in Store(store).status(name))]


def show(store: Path, question: str) -> None:
    """Display what the page of a question says: its answer, and the words, figures and tables of its sections.

    Args:
        store: The folder of the store.
        question: Name of an experiment.
    """
    from IPython.display import display

    for article in articles(store, load.read(store, question)):
        display(*article.answer.sentences)
        for section in article.sections:
            display(section.title.upper())
            for block in section.blocks:
                if isinstance(block, Text):
                    display(block.text)
                elif isinstance(block, Picture):
                    display(block)
                elif isinstance(block, Table):
                    display(DataFrame(block.rows, columns=[*block.head]))
