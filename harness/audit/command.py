"""The process in which the audited code runs: it judges, and hands over what is to be said and the exit code.

Started by `__main__.py` as `python -m harness.audit.command DESCRIPTOR ARGUMENT...`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from harness.terminal import BAD_INPUT, one_line


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
    made.add_argument(
        "--save", action="append", type=_page, default=[], metavar="FILE", help="write .html or .json; may be repeated"
    )
    made.add_argument("--record", type=_record, metavar="FILE.json", help="record of a released trainer to add this function to")
    made.add_argument(
        "--packages", default="torch", metavar="P,P", help="packages whose versions go into it, the audited one first"
    )
    return made


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, as 4,16, got {text}") from None


def _record(text: str) -> Path:
    return _regular(Path(text).absolute())


def _page(text: str) -> Path:
    if Path(text).suffix not in (".html", ".json"):
        raise argparse.ArgumentTypeError(f"expected a path ending in .html or .json, got {text}")
    return _target(text)


def _target(text: str) -> Path:
    """Where a file can be written, also after the audited code has changed the working folder."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, got {text}")
    return _regular(path)


def _regular(path: Path) -> Path:
    """A path that a file may be moved to: never over a device, a pipe or a link, which would be gone then."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise argparse.ArgumentTypeError(f"expected a regular file or a new one, got {path}")
    return path


def judge(given: argparse.Namespace) -> tuple[int, str, str]:
    """Audit and save: the exit code, what goes to stdout, and to stderr. Nothing that the audited code raises escapes."""
    said, doing = "", "run"
    try:
        from harness.audit.observe.runs import load
        from harness.audit.released import record
        from harness.audit.session import audit

        train = load(given.train)
        report = audit(
            train,
            batch_size=given.batch_size,
            accumulation_steps=given.accumulation_steps,
            reference=load(given.reference) if given.reference else None,
            processes=given.processes,
        )
        said, doing = str(report), "be saved"
        if given.record is not None:
            settings = {name: vars(given)[name] for name in ("batch_size", "accumulation_steps", "processes")}
            record(given.record, train, report, packages=given.packages.split(","), settings=settings)
        for path in given.save:
            said += f"saved {report.save(path)}\n"
    except BaseException as error:  # reading the file can raise anything
        what = one_line(f"{type(error).__name__}: {error}").removesuffix(":")
        return BAD_INPUT, said, f"audit could not {doing}: {what}\n"
    return report.exit_code, said, ""


def main(descriptor: int, arguments: Sequence[str]) -> None:
    """Judge, and hand over the answer; what the audited code has left to be done at its end comes after that."""
    answer = json.dumps(judge(parser().parse_args(arguments))).encode()
    with suppress(OSError):  # the audited code has closed it: then there is no answer
        Connection(descriptor).send_bytes(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
