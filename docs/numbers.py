"""Numbers on pages: each has one source, and is written where a page marks it with the number's name, as `1,198<!--=planted-->`.

    python -m docs.numbers      # writes them into README.md and docs/*.md; part of `make docs`

What the kept trials say is computed from them. What a benchmark or another run gave once stands in `findings/measured.csv`, with
its commit. A range in brackets belongs to its number: `0.60 (0.48 to 0.97)<!--=name-->`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas as pd
from pandas import Series

from accumulation_harness.analysis import faults
from accumulation_harness.experiments.sensitivity.answers import rates, smallest
from accumulation_harness.experiments.shared.recorded import recorded
from tests.golden import FINDINGS, kept_archive, kept_results

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), FINDINGS / "README.md")
NUMBER = r"[≤<]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
MARKED = re.compile(rf"({NUMBER}(?: \(-?{NUMBER} to -?{NUMBER}\))?)<!--=([\w.-]+)-->")


@cache
def sources() -> dict[str, str]:
    """Every number by its name, as it is written.

    Returns:
        Name -> text, as `{"planted": "1,198"}`.

    Raises:
        ValueError: Two sources give the same name.
    """
    found: dict[str, str] = {}
    for make in (measured, drawn, costs, equivalence, planted, claims, accumulated):
        for name, text in make():
            if name in found:
                raise ValueError(f"{name}: expected one source, got {found[name]} and {text}")
            found[name] = text
    return found


def written(page: str) -> str:
    """Write the numbers into a page.

    Args:
        page: Its text.

    Returns:
        The text in which every marked number is that of its source.

    Raises:
        KeyError: A marker names a number that no source has, or stands behind none.
    """
    if unread := set(re.findall(r"<!--=(.*?)-->", page)) - {name for _, name in MARKED.findall(page)}:
        raise KeyError(f"expected a number before the marker, got {', '.join(sorted(unread))}")
    return MARKED.sub(lambda found: f"{sources()[found[2]]}<!--={found[2]}-->", page)


def measured() -> Iterator[tuple[str, str]]:
    """Yield what was measured once: name and text."""
    with (FINDINGS / "measured.csv").open(newline="") as file:
        yield from ((row["name"], row["value"]) for row in csv.DictReader(file))


def drawn() -> Iterator[tuple[str, str]]:
    """Yield what right trials with settings drawn at random said, as recorded."""
    (row,) = recorded("right_settings").to_dict("records")
    yield from ((f"random.{name}", f"{row[name]:,}") for name in ("trials", "arms", "alarms"))


def costs() -> Iterator[tuple[str, str]]:
    """Yield by how much more time a watched window takes."""
    one = {name: float(text.split()[0].replace(",", "")) for name, text in measured()}
    yield from ((f"watch.{size}.more", f"{100 * (one[f'watch.{size}'] - 1):.0f}") for size in ("ten-million", "million"))


def equivalence() -> Iterator[tuple[str, str]]:
    """Yield the counts, distances and ratios of the main experiment, from its kept trials."""
    arms = kept_results().arms.query("experiment == 'equivalence'")
    runs = arms.query("arm == 'accumulated'")
    verdicts = runs["verdict"].value_counts()
    assert verdicts.index.isin(["equivalent", "different"]).all()
    assert (runs["verdict"].eq("different") == runs["norm"].eq("batch")).all() and runs.query("norm == 'batch'")[
        "explained"
    ].all()
    yield "runs", f"{len(runs):,}"
    yield "same", str(verdicts["equivalent"])
    yield "parted", str(verdicts["different"])
    yield "same.largest", _at_most(runs.query("norm != 'batch'")["algebra_error"])
    rows = {str(model).replace(" ", "-"): own for model, own in runs.query("norm != 'batch'").groupby("model")}
    for name, own in (rows | {"permuted": arms.query("arm == 'permuted'")}).items():
        assert (own["verdict"] == "equivalent").all()
        yield f"{name}.arms", str(len(own))
        yield f"{name}.algebra", _at_most(own["algebra_error"])
        for precision, ratios in own.groupby("precision")["rounding_ratio"]:
            yield f"{name}.{precision}", f"{ratios.median():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
    probed = runs.query("norm == 'batch' and precision == 'float32' and effective_batch == 64")
    for num, error in probed.groupby("accumulation_steps")["gradient_error"].median().items():
        yield f"batch.n{num}", f"{error:.3f}"


def planted() -> Iterator[tuple[str, str]]:
    """Yield how many planted faults were found, and the smallest error that was."""
    arms = kept_results().arms
    catalogue = faults.catalogue(arms.query("experiment == 'fault_matrix'"))
    changed = catalogue[catalogue["changes"]]
    assert changed["named"].all()
    yield "planted", f"{len(changed):,}"
    yield "planted.kinds", str(changed["arm"].nunique())
    yield "planted.trials", str(changed["trial"].nunique())
    yield "planted.unchanged", str(len(catalogue) - len(changed))
    for precision, own in rates(arms.query("experiment == 'sensitivity'")).groupby("precision"):
        yield f"found.{precision}", f"{max(smallest(rows) for _, rows in own.groupby('kind')):.0e}".replace("e-0", "e-")


def claims() -> Iterator[tuple[str, str]]:
    """Yield how many claims have each verdict, from the table beside the kept trials."""
    verdicts = pd.read_csv(kept_archive().with_name("claims.csv"), keep_default_na=False)["verdict"]
    yield "claims", str(len(verdicts))
    for verdict, count in verdicts.value_counts().items():
        yield f"claims.{str(verdict).replace(' ', '-')}", str(count)


def accumulated() -> Iterator[tuple[str, str]]:
    """Yield how much longer accumulation takes to a target, and what memory it saves, from `findings/accumulate.csv`."""
    for task, rows in pd.read_csv(FINDINGS / "accumulate.csv").groupby("task", sort=False):
        name = str(task).split(",")[1].split()[0].lower() if "digits" in str(task) else str(task).split(",")[0].split()[1]
        fastest = rows.loc[rows["seconds"].idxmin()]
        assert fastest["N"] == 1
        yield f"{name}.fastest", f"{fastest['b']:.0f}"
        yield f"{name}.more", f"{rows.query('N > 1')['seconds'].min() / fastest['seconds']:.2f}"
        at = rows.set_index(["b", "N"])
        for batch in (64, 256):
            whole, parts = at.loc[(batch, 1)], at.loc[(batch // 4, 4)]
            yield f"{name}.seconds{batch}", f"{parts['seconds'] / whole['seconds']:.2f}"
            yield f"{name}.memory{batch}", f"{parts['bytes'] / whole['bytes']:.2f}"
        if name == "convolutions":  # the one batch that is faster in two pieces
            yield f"{name}.exception", f"{at.loc[(256, 2)]['seconds'] / at.loc[(512, 1)]['seconds']:.2f}"


def _at_most(errors: Series[float]) -> str:
    """The largest, rounded up to one digit."""
    unit = 10.0 ** math.floor(math.log10(errors.max()))
    return f"{math.ceil(errors.max() / unit) * unit:.0e}".replace("e-0", "e-")


def main() -> None:
    """Write the numbers into the pages."""
    for page in PAGES:
        text = page.read_text()
        if (now := written(text)) != text:
            page.write_text(now)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
