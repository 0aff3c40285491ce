"""`python benchmarks/gpu_page.py results/gpu/gpu.tar.gz ...`: a page of findings from what a card has shown.

Writes docs/findings/gpu/DATE-CARD.md and changes the sentences of `SENTENCES`; one that reads otherwise by then is printed.
Of a rehearsal the page goes beside the archive, and nothing is changed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu

from accumulation_harness.judge.gates import ROUNDING_GATE

ROOT = Path(__file__).parents[1]
# File -> what it says before the first card, and what then; `{page}` lies in docs/findings/gpu/.
SENTENCES = {
    "README.md": ("Nothing has been measured on a GPU yet.", "On [one {card}](docs/findings/gpu/{page}): {summary}."),
    "docs/performance.md": (
        "Nothing has been measured on a GPU\nyet (`make gpu`).",
        "What it costs on\n[one {card}](findings/gpu/{page}) (`make gpu`): {summary}.",
    ),
    "docs/gpu.md": (
        "Nothing of this project has run on a GPU yet.",
        "[One {card}](findings/gpu/{page}) has shown: {summary}.",
    ),
    "docs/findings/README.md": (
        "| `tests/simgpu`, by hand | told there | no GPU |\n",
        "| `tests/simgpu`, by hand | told there | no GPU |\n"
        "| [gpu/{page}](gpu/{page}): {summary} | `make gpu` | {commit} | one {card} |\n",
    ),
    "mkdocs.yml": (
        "      - The CUDA path: findings/gpu.md\n",
        "      - The CUDA path: findings/gpu.md\n      - On one {card}: findings/gpu/{page}\n",
    ),
}
Row = Mapping[str, Any]


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]


def cell(arms: Sequence[Row], arm: str, num: int) -> str:
    """The verdict of an arm, its cause, and how near its rounding came to the gate."""
    for row in arms:
        if (row["arm"], row["accumulation_steps"]) == (arm, num):
            named = f" ({row['cause']}{', explained' if row['explained'] else ''})" if row["cause"] else ""
            return f"{row['verdict']}{named}" + (
                f", {row['rounding_ratio'] / ROUNDING_GATE:.2f}" if row["verdict"] == "equivalent" else ""
            )
    return ""


def page(work: Path, machine: Row, commit: str) -> Iterator[str]:
    """The lines of the page."""
    yield f"# On one {machine['device']}, {machine['date']}"
    yield ""
    packages = {"Python": machine["python"], **machine["packages"]}
    card = {key: machine[key] for key in ("driver", "cuda", "cudnn", "capability", "tf32") if key in machine}
    yield (
        f"Commit {commit}, {machine['date']}. "
        + ", ".join(f"{name} {number}" for name, number in (card | packages).items())
        + "."
    )
    yield "Written by `python benchmarks/gpu_page.py` from what `make gpu` packed. What was not reached is told last."
    found = {stage: gpu.answers(work, stage) for stage in gpu.SHARES}
    question = ("question", "answer", "number")
    yield from ["", "## Questions that only a card answers", "", *markdown(question, found["claims"])]
    trials = gpu.rows_of(work, "grid", "arms")
    nums = sorted({arm["accumulation_steps"] for row in trials for arm in row["arms"] if arm["arm"] == "accumulated"})
    yield from [
        "",
        "## The main grid",
        "",
        "Behind `equivalent`: the rounding error's ratio over its gate. BatchNorm is expected to be different, and explained.",
        "",
    ]
    verdicts = [
        (
            *(row[key] for key in ("workload", "norm", "optimizer", "precision")),
            *(cell(row["arms"], "accumulated", num) for num in nums),
            cell(row["arms"], "permuted", 1),
            "yes" if row["holds"] else "no",
        )
        for row in trials
    ]
    labels = ("model", "norm", "optimizer", "precision")
    yield from markdown((*labels, *(f"N = {num}" for num in nums), "shuffled full batch", "as expected"), verdicts)
    yield from ["", "## Throughput and memory over b and N, and the planner beside the allocator", ""]
    costs = [
        (
            *(row[key] for key in ("workload", "precision", "b", "N")),
            f"{row['per_second']:,.0f}",
            *(f"{row[key] / 1e6:.4g}" for key in ("planned", "allocated")),
            f"{row['planned'] / row['allocated']:.3f}",
        )
        for row in gpu.rows_of(work, "planner", "planned")
    ]
    measured = ("samples per second", "planned, MB", "allocated, MB", "planned over allocated")
    yield from markdown(("model", "precision", "b", "N", *measured), costs)
    for stage, heading in (
        ("large", "A watch and an audit on 125 million parameters"),
        ("cost", "The cost of measuring"),
        ("machine", "The machine"),
    ):
        yield from ["", f"## {heading}", "", *markdown(question, (row for row in found[stage] if row[2]))]
    open_ones = [(stage, *row) for stage, rows in found.items() for row in rows if row[1] in gpu.BAD]
    yield from [
        "",
        "## Failed, not reached, or answered with no",
        "",
        *markdown(("stage", *question), open_ones or [("none", "", "", "")]),
    ]


def summary(work: Path) -> str:
    """What README says in half a line."""
    claims = [answer for _, answer, _ in gpu.answers(work, "claims")]
    grid = [row["holds"] for row in gpu.rows_of(work, "grid", "arms")]
    answered = f"{claims.count('yes')} of {len(claims)} questions that only a card answers are answered with yes"
    return f"{answered}, and {sum(grid)} of {len(grid)} trials of the main grid are as expected"


def changed(root: Path, values: Mapping[str, str]) -> Iterator[str]:
    """Change the sentences under `root`; what could not be changed is told."""
    for name, (before, after) in SENTENCES.items():
        text, new = (root / name).read_text(), after.format(**values)
        if text.count(before) == 1 and values["page"] not in text:
            (root / name).write_text(text.replace(before, new))
        elif values["page"] not in text:
            yield f"{name} says something else by now; it should say: {' '.join(new.split())}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 where the archive names no commit and none is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", type=Path, nargs="+", help="of a later one what it asked again counts")
    parser.add_argument("--commit", help="of the tree that ran, where that machine had no git")
    parser.add_argument("--root", type=Path, default=ROOT, help="whose pages are changed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows: list[Row] = []
        for path in options.archives:
            with tarfile.open(path) as archive:
                new = [json.loads(line) for line in archive.extractfile("gpu/rows.jsonl").read().splitlines()]  # type: ignore[union-attr]
            asked = {(row["stage"], row.get("item")) for row in new}
            rows = [row for row in rows if (row["stage"], row.get("item")) not in asked] + new
        (work / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        machine = next(iter(gpu.rows_of(work, "machine", "packages")), None)
        if machine is None or not (commit := machine["commit"] or options.commit):
            print(
                "the archive does not say what ran: --commit" if machine else "the archive does not name its machine",
                file=sys.stderr,
            )
            return 2
        name = f"{machine['date']}-{re.sub('[^a-z0-9]+', '-', machine['device'].lower())}.md"
        target = options.root / "docs/findings/gpu" / name if machine["is_card"] else options.archives[0].with_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(page(work, machine, commit)) + "\n")
        values = {"page": name, "card": machine["device"], "commit": commit[:7], "summary": summary(work)}
        print(target, *(changed(options.root, values) if machine["is_card"] else ()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
