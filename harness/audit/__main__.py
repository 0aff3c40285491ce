"""The command line: `python -m harness.audit FILE.py:FUNCTION --batch-size 16 --accumulation-steps 4,16`.

Exit code 0: equivalent; 1: different; 2: could not be run or judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.audit.observe.runs import load
from harness.audit.released import record
from harness.audit.session import audit
from harness.processes import run_command


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m harness.audit",
        description="Does gradient accumulation change what a training function computes, and why?",
        epilog="exit code 0: equivalent, 1: different, 2: could not be run or judged",
    )
    made.add_argument(
        "train", metavar="FILE.py:FUNCTION", help="train(batch_size, accumulation_steps): seeds itself, a handful of steps"
    )
    made.add_argument("--batch-size", type=int, required=True, help="samples per optimizer step")
    made.add_argument("--accumulation-steps", type=_numbers, required=True, metavar="N,N", help="micro-batches per step, as 4,16")
    made.add_argument("--reference", metavar="FILE.py:FUNCTION", help="an independent function to compare with")
    made.add_argument("--processes", type=int, default=1, help="ranks of torch.distributed (default 1)")
    made.add_argument("--save", action="append", default=[], metavar="FILE", help="write .html or .json; may be repeated")
    made.add_argument("--record", type=Path, metavar="FILE.json", help="record of a released trainer to add this function to")
    made.add_argument(
        "--packages", default="torch", metavar="P,P", help="packages whose versions go into it, the audited one first"
    )
    return made


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, as 4,16, got {text}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print and save; the exit code. `arguments` are those of the command line unless given."""
    given = parser().parse_args(arguments)
    try:
        wrong = [path for path in given.save if Path(path).suffix not in (".html", ".json")]
        if wrong:
            raise ValueError(f"expected --save paths ending in .html or .json, got {', '.join(wrong)}")
        train = load(given.train)
        report = audit(
            train,
            batch_size=given.batch_size,
            accumulation_steps=given.accumulation_steps,
            reference=load(given.reference) if given.reference else None,
            processes=given.processes,
        )
    except Exception as error:  # reading the file can raise anything
        print(f"audit could not run: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(report, end="")
    if given.record:
        settings = {
            "batch_size": given.batch_size,
            "accumulation_steps": list(given.accumulation_steps),
            "processes": given.processes,
        }
        record(given.record, train, report, packages=given.packages.split(","), settings=settings)
    for path in given.save:
        print(f"saved {report.save(path)}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(run_command(main))
