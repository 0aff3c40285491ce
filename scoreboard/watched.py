"""The record of real trainers under watch, and its page: `python scoreboard/watched.py [PART OF A NAME ...]`.

It runs where transformers, TRL, Lightning and accelerate are installed, and writes `records/watched.csv`: what was watched, the
causes that the run should have, and what the watch said of it. Runs that are not asked for keep their rows.
"""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "records" / "watched.csv"
PAGE = HERE.parent / "docs/findings/watched_trainers.md"
COLUMNS = ("trainer", "run", "wrong", "verdict", "causes", "version", "torch", "date", "commit")
Row = dict[str, str]


def held() -> list[Row]:
    """The rows of the record."""
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def is_told(row: Row) -> bool:
    """Whether the watch said of a run what it should: its causes and no other, or `equivalent` where it is right."""
    return (row["verdict"], row["causes"]) == ("different" if row["wrong"] else "equivalent", row["wrong"])


def page(rows: Sequence[Row]) -> str:
    """In Markdown."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    right, wrong = ([row for row in rows if bool(row["wrong"]) is kind] for kind in (False, True))
    versions = ", ".join(dict.fromkeys(f"{row['trainer']} {row['version']}" for row in rows))
    yield "# Trainers that were watched"
    yield ""
    yield (
        f"{len(right)} right runs, of which {sum(map(is_told, right))} are `equivalent`, and {len(wrong)} wrong ones, of which "
        f"{sum(map(is_told, wrong))} have their causes and no other: {versions}, as released, on tiny models and a CPU, with the "
        "watch's callbacks (in transformers and TRL with `rows_apart=True`, which losses of their own need to be `equivalent`). "
        "[The record](../../scoreboard/records/watched.csv) has versions, dates and commits; `python scoreboard/watched.py` "
        "makes it anew, and this page."
    )
    for heading, some in (("Right", right), ("Wrong", wrong)):
        yield from ("", f"## {heading}", "", "| trainer | run | what the watch says |", "|---|---|---|")
        for row in some:
            said = " ".join(f"`{cause}`" for cause in row["causes"].split("+")) if row["causes"] else row["verdict"]
            wrongly = "" if is_told(row) or row["verdict"] == "inconclusive" else ", wrongly"
            yield f"| {row['trainer']} | {row['run']} | {said}{wrongly} |"


def main(parts: Sequence[str]) -> None:
    """Run what is asked for, by default all, put it into the record, and write the page."""
    os.environ |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from scoreboard.watched_runs import RUNS

    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    kept = {(row["trainer"], row["run"]): row for row in held()} if RECORD.exists() else {}
    for trainer, run, wrong, watched in RUNS:
        if not parts or any(part in f"{trainer} {run}" for part in parts):
            report, today = watched(), str(datetime.datetime.now(datetime.UTC).date())
            causes = "+".join(sorted(report.causes))
            row = (trainer, run, wrong, str(report.verdict), causes, version(trainer), version("torch"), today, commit)
            kept[trainer, run] = dict(zip(COLUMNS, row, strict=True))
            print(f"{trainer:13} {run:64} {wrong or 'right'}: {report.verdict} {causes}", flush=True)
    rows = [kept[trainer, run] for trainer, run, *_ in RUNS if (trainer, run) in kept]
    with RECORD.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
