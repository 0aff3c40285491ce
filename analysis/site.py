"""The pages: an entry that answers first, one page per question, the ledger of claims, and the provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis import ledger, load, sections, tables
from accumulation_harness.analysis.article import Article
from accumulation_harness.analysis.content import marked, number, worded
from accumulation_harness.analysis.question import advised
from accumulation_harness.config.questions import FOLDER
from accumulation_harness.judge.gates import ALGEBRA_GATE, ROUNDING_GATE, TRAJECTORY_GATE

MAX_LISTED = 50


def pages(
    loaded: load.Results, articles: Sequence[Article], claims: DataFrame, notes: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Name and content of every file, the entry last: when it is there, all that it leads to is.

    Args:
        loaded: What a store holds.
        articles: One for each experiment.
        claims: Rows of `claims.csv`.
        notes: What is missing, damaged or stale.

    Yields:
        Path, content.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"worded": worded, "marked": marked}
    rows = advised(loaded)
    gates = {"algebra": ALGEBRA_GATE, "trajectory": TRAJECTORY_GATE, "rounding": ROUNDING_GATE}
    shared: dict[str, Any] = {
        "meanings": [(state, sections.SYMBOLS[state], words) for state, words in sections.MEANINGS.items()],
        "gates": {name: f"{gate:g}" for name, gate in gates.items()},
        "ledger": None if claims.empty else ledger.ledger(claims),
        "hrefs": {article.experiment.name: article.href for article in articles},
    }

    def made(template: str, up: str = "", **values: Any) -> str:
        return environment.get_template(f"{template}.html.j2").render(**shared, up=up, **values)

    for article in articles:
        own = [row for row in rows if row.experiment == article.experiment.name]
        yield article.href, made("question", "../", article=article, rows=own)
    if shared["ledger"]:
        yield "claims.html", made("claims", sources=_sources())
    yield "provenance.html", made("provenance", **_provenance(loaded, notes))
    own_sweeps = sorted((one for one in articles if one.is_own), key=lambda one: (not one.sections, -one.ended))
    about = f"{len(loaded.trials)} finished trials, {len(loaded.missing)} without a result."
    asked = [article for article in articles if not article.is_own]
    yield "index.html", made("index", rows=rows, own=own_sweeps, articles=asked, provenance=about)


def _sources() -> list[Mapping[str, str]]:
    """The articles that the claims are taken from."""
    rows = pd.read_csv(str(files(FOLDER) / "sources.csv"), dtype=str).fillna("").to_dict("records")
    return [{str(name): str(value) for name, value in row.items()} for row in rows]


def _provenance(loaded: load.Results, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "missing": loaded.missing[:MAX_LISTED],
        "num_missing": len(loaded.missing),
        "notes": notes,
        "facts": _facts(loaded),
        "environments": _environments(loaded.trials),
    }


def _facts(loaded: load.Results) -> list[tuple[str, str]]:
    """What identifies the results of a page, and the time they took."""
    names = "".join(f"{e}/{t}\n" for e, t in zip(loaded.trials["experiment"], loaded.trials["trial"], strict=True))
    spent = tables.seconds(loaded.trials)
    phases = ", ".join(f"{name} {_duration(value)}" for name, value in spent.drop("total").items())
    measured, found = (int(loaded.trials[name].sum()) for name in ("measured", "found"))
    return [
        ("Trials", f"{len(loaded.trials)} finished, {len(loaded.missing)} without a result"),
        ("Arms", f"{len(loaded.arms)}, and {int(loaded.trials['rows'].sum()):,} rows of steps"),
        ("Measurements", f"{measured} that trials share; {found} were found, made by another trial of the store"),
        ("Configurations", f"SHA-256 {hashlib.sha256(names.encode()).hexdigest()} (over the sorted names of the trials)"),
        ("Time", f"{_duration(spent['total'])} of computing, summed over trials ({phases})"),
    ]  # fmt: skip


def _environments(trials: DataFrame) -> list[tuple[str, int]]:
    counts: dict[Any, int] = trials["environment"].value_counts().to_dict()
    return sorted(((str(name), count) for name, count in counts.items()), key=lambda pair: (-pair[1], pair[0]))[:10]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{number(round(seconds, 1))} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
