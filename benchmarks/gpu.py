"""`make gpu` on a machine with a CUDA card: `python benchmarks/gpu.py [--minutes 8] [--out DIR]`; DIR/gpu.tar.gz is what to send.

Six stages in the order of what only a card can show (`gpu_stages.py`), each with its share of the time that is left. What crashes
or hangs loses one item of its stage. After each stage the table and the archive are written anew; the table is printed last.
`--device cpu` rehearses: small sizes, and the stand-in device of the tests.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARES = {"machine": 0.04, "claims": 0.24, "grid": 0.36, "large": 0.15, "planner": 0.08, "cost": 0.13}
MOST = 15 * 2**20  # bytes of the archive, whose last file is let in by its own size
CLAIMS, NEEDED = "claims", "needs a card (stand-in: {})"  # the stage whose answers only a card can give
BAD = ("no", "failed", "not reached", NEEDED.format("no"))


def run_stage(name: str, device: str, work: Path, seconds: float) -> None:
    """Go on behind an item that ended its process, until all were begun or the time is over."""
    end, paths = time.monotonic() + seconds, (str(ROOT / "harness"), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "PYTHONUNBUFFERED": "1"}
    code, begun = 1, -1
    while code != 0 and (left := end - time.monotonic()) > 1 and begun < (begun := len(rows_of(work, name, "begun"))):
        arguments = ("--device", device, "--out", work, "--seconds", f"{left:.1f}")
        program = Path(__file__).with_name("gpu_stages.py")
        command = [sys.executable, "-X", "faulthandler", *map(str, (program, name, *arguments))]
        with (work / f"{name}.log").open("a") as log:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(left)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with all that it has started
            with suppress(subprocess.TimeoutExpired):
                child.wait(10)  # a driver that does not answer holds it longer
    if code != 0 and not rows_of(work, name, "items"):
        lines = (work / f"{name}.log").read_text(errors="replace").split("\n")
        note = {"stage": name, "item": "the stage", "error": f"cannot start: {next((one for one in reversed(lines) if one), '')}"}
        with (work / "rows.jsonl").open("a") as file:
            print(json.dumps(note), file=file)


def rows_of(work: Path, stage: str, key: str) -> list[dict[str, Any]]:
    """The rows of a stage that have `key`."""
    path, rows = work / "rows.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a process may have ended in the middle of a line
            rows.append(json.loads(line))
    return [row for row in rows if row["stage"] == stage and key in row]


def answers(work: Path, stage: str) -> list[tuple[str, str, str]]:
    """(question, answer, number) of a stage: what was found, and what became of the items that found nothing."""
    found = []
    for row in rows_of(work, stage, "what"):
        answer = {True: "yes", False: "no", None: ""}[row.get("holds")]
        if stage == CLAIMS and not row["is_card"]:
            answer = NEEDED.format(answer)
        found.append((row["what"], answer, row.get("number", "")))
    failed = {row["item"]: row["error"] for row in rows_of(work, stage, "error")}
    ended = {row["item"] for row in rows_of(work, stage, "seconds")}
    found += [(item, "failed", error) for item, error in failed.items()]
    begun = {row["item"] for row in rows_of(work, stage, "begun")} - ended - failed.keys()
    found += [(item, "failed", f"crashed, hung or out of time: {stage}.log") for item in sorted(begun)]
    items = [item for row in rows_of(work, stage, "items") for item in row["items"]] or ["the stage"]
    left = dict.fromkeys(items).keys() - ended - begun - failed.keys()
    return found + [(item, "not reached", "") for item in sorted(left)]


def table(work: Path, stages: Iterable[str]) -> str:
    """Their answers, as Markdown."""
    lines = ["| stage | question | answer | number |", "|---|---|---|---|"]
    for stage in stages:
        lines += [
            f"| {stage} | {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |"
            for row in answers(work, stage)
        ]
    return "\n".join(lines) + "\n"


def pack(work: Path, out: Path, stages: Iterable[str]) -> None:
    """The table and the archive into `out`, the smallest files first, as many as go into 16 MiB."""
    for folder in (work, out):
        (folder / "table.md").write_text(table(work, stages))
    files = {}
    for path in work.rglob("*"):
        with suppress(OSError):  # what was killed a moment ago may still take its files away
            if path.is_file() and path.stat().st_size <= MOST:
                files[path] = path.read_bytes()
    unfinished = out / "gpu.part"
    with unfinished.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for path, content in sorted(files.items(), key=lambda item: len(item[1])):
            if raw.tell() + len(content) <= MOST:
                member = tarfile.TarInfo(f"gpu/{path.relative_to(work)}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    unfinished.replace(out / "gpu.tar.gz")


def main() -> int:
    """1 where something failed, was not reached, or is answered with no."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--stages", default=",".join(SHARES), help="those of a second run")
    options = parser.parse_args()
    names = [name for name in SHARES if name in options.stages.split(",")]
    out, end = options.out.absolute(), time.monotonic() + 60 * options.minutes
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        for k, name in enumerate(names):
            left, started = end - time.monotonic(), time.monotonic()
            run_stage(name, options.device, work, left * SHARES[name] / sum(SHARES[one] for one in names[k:]))
            pack(work, out, names)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        print("", table(work, names), f"everything is in {out}/gpu.tar.gz: please send it, whatever failed", sep="\n")
        return int(any(answer in BAD for name in names for _, answer, _ in answers(work, name)))


if __name__ == "__main__":
    sys.exit(main())
