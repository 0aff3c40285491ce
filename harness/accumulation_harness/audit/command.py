"""The process in which the audited code runs: it judges, and hands over what is to be said and the exit code.

With `--launched` it is one rank of several: rank 0 judges, the others make the runs that it asks for.

Started by `__main__.py` as `accumulation-harness audit.command DESCRIPTOR ARGUMENT...`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from accumulation_harness.audit.rank import Rank
from accumulation_harness.audit.request import ENDINGS, MAX_STEPS, Format, causes_of, format_of
from accumulation_harness.system import dynamo
from accumulation_harness.system.packages import HAS_TORCH
from accumulation_harness.system.terminal import BAD_INPUT, one_line

if TYPE_CHECKING:
    from accumulation_harness.audit.report import Report
    from accumulation_harness.audit.report.conclusion import Line
    from accumulation_harness.audit.report.subject import Subject
    from accumulation_harness.audit.user_code.call import UserCode

SETS = ("--set", "--set-env", "--set-file")

DESCRIPTION = "Does gradient accumulation change what a training function computes, and why?"
EPILOG = (
    """exit code 0: equivalent, 1: different, 2: could not be run or judged

A script is run as it is, once for each way to cut a batch; what is behind -- is handed on. Where its text does not show how it
gets the two numbers, --set says it:
    accumulation-harness audit train.py --batch-size 32 --accumulation-steps 4 \
        --set '--batch-size {batch_size} --grad-accum {accumulation_steps}' -- --config tiny.yaml
"""
    + """

Of ranks that another program starts, rank 0 reports for all:
    torchrun --nproc-per-node 4 -m accumulation_harness.audit FILE.py:FUNCTION --batch-size 4 \
        --accumulation-steps 4 --launched"""
)


def parser() -> argparse.ArgumentParser:
    """The options of the command.

    Returns:
        A parser that exits with a message where a value has the wrong form.
    """
    made = argparse.ArgumentParser(
        prog="accumulation-harness audit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(rest=(), rank=0, read="")
    made.add_argument(
        "train",
        nargs="?",
        metavar="TARGET",
        help="SCRIPT.py, a notebook, FILE.py:FUNCTION, FILE.py:Class.method or package.module:FUNCTION; a function is called as "
        "train(batch_size, accumulation_steps) with the samples of a micro-batch and their number: train(32, 1) and train(8, 4)",
    )
    made.add_argument("--batch-size", type=int, default=32, help="samples per optimizer step (of one rank; default 32)")
    many = "micro-batches per step, as 4,16 (default 4)"
    made.add_argument("--accumulation-steps", type=_numbers, default=(4,), metavar="N,N", help=many)
    made.add_argument("--reference", metavar="FILE.py:FUNCTION", help="an independent function to compare with")
    made.add_argument("--processes", type=int, default=1, help="ranks of torch.distributed (default 1)")
    steps = f"optimizer steps at which a run ends (default {MAX_STEPS}; for a script an epoch, or a few slow steps)"
    made.add_argument("--max-steps", type=int, help=steps)
    _add_settings(made)
    made.add_argument(
        "--explain",
        action="store_true",
        help="say what the runs would do differently, as far as the source shows, and run nothing",
    )
    made.add_argument(
        "--in-place", action="store_true", help="run in this folder, where files are overwritten, not in a scratch one"
    )
    made.add_argument(
        "--allow",
        type=_causes,
        default=frozenset(),
        metavar="CAUSE,CAUSE",
        help="causes that are reported and do not fail the audit, as stochastic_layers",
    )
    made.add_argument("--launched", action="store_true", help="be a rank of torchrun or srun, of which rank 0 judges")
    made.add_argument("--replicas", type=int, help="with --launched: ranks that take rows of their own (default all)")
    made.add_argument(
        "--format",
        choices=get_args(Format),
        default="text",
        help="the format of stdout; remarks then go to stderr (default text)",
    )
    made.add_argument(
        "--save", action="append", type=_page, default=[], metavar="FILE", help=f"write {' '.join(ENDINGS)}; may be repeated"
    )
    made.add_argument("--report", type=_issue, metavar="FILE.md", help="write an issue for the maintainer of the function")
    return made


def _add_settings(made: argparse.ArgumentParser) -> None:
    """How a script is told the two numbers."""
    numbers = "{batch_size} (of a micro-batch), {accumulation_steps}, {total_batch}"
    for option, form, what in (
        ("--set", "WORDS", f"command line of the script, with {numbers}; may be repeated"),
        ("--set-env", "NAME=VALUE", "variable of the environment, likewise"),
        (
            "--set-file",
            "FILE:KEY=VALUE",
            "value in a YAML, TOML, INI or JSON file that it reads, or of a name in a .py file, likewise",
        ),
    ):
        made.add_argument(option, action="append", default=[], metavar=form, help=what)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What the command line asks for. Ends the process where it asks for what does not go together.

    Args:
        arguments: Words of the command line.

    Returns:
        The options, checked against each other.
    """
    made = parser()
    own, rest = _apart(arguments)
    given = made.parse_args(own)
    if given.train is None:  # behind `--`, where it is taken for no option of ours
        if not rest:
            made.error("the following arguments are required: TARGET")
        given.train, *rest = rest
    given.rest = tuple(rest)
    if given.explain and given.format != "text":
        made.error("expected no --format with --explain, which says it in text")
    if given.launched and given.processes != 1:
        made.error("expected no --processes with --launched: whoever launches the ranks says how many they are")
    if given.replicas is not None and not given.launched:
        made.error("expected --replicas with --launched alone")
    if given.launched:
        try:
            rank = Rank.of_environment()
        except ValueError as error:
            made.error(str(error))
        given.rank, given.processes = rank.number, rank.world
    return given


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those behind `--`; what --set is given may look like an option of ours."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    own: list[str] = []
    for word in words[:end]:
        if own and own[-1] in SETS:
            own[-1] += f"={word}"
        else:
            own.append(word)
    return own, words[end + 1 :]


T = TypeVar("T")


def _argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """What reads an argument, so that argparse says what its ValueError says."""

    def of(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return of


@_argument
def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().removeprefix("-").isdecimal() for part in parts):
        raise ValueError(f"expected numbers separated by commas, as 4,16, got {text}")
    return tuple(map(int, parts))


@_argument
def _causes(text: str) -> frozenset[str]:
    return causes_of(text.split(","))


@_argument
def _page(text: str) -> Path:
    format_of(Path(text))
    return _target(text)


@_argument
def _issue(text: str) -> Path:
    if Path(text).suffix != ".md":
        raise ValueError(f"expected a path ending in .md, got {text}")
    return _target(text)


def _target(text: str) -> Path:
    """Where a file can be written, also after the audited code has changed the working folder.

    Never a device, a pipe or a link, which would be gone once a file is moved there.

    Returns:
        An absolute path.

    Raises:
        ValueError: Its folder is not there, or it is no regular file.
    """
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"expected a file in a folder that is there, got {text}")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"expected a regular file or a new one, got {path}")
    return path


def judge(given: argparse.Namespace) -> tuple[int, str, str]:
    """Audit and save: the exit code, what goes to stdout, and to stderr. Nothing that the audited code raises escapes.

    Args:
        given: The parsed command line.

    Returns:
        Exit code, text for stdout, text for stderr.
    """
    begun = time.monotonic()
    read_script(given)
    subject = subject_of(given)
    try:
        report = _audited(given)
        if report is None:  # of a rank that judges nothing
            return 0, "", ""
        return _answer(given, replace(report, subject=subject, seconds=time.monotonic() - begun))
    except BaseException as error:  # reading the file can raise anything
        return refused(given, subject, f"audit could not run: {_told(error)}")


def _audited(given: argparse.Namespace) -> Report | None:
    import numpy as np

    from accumulation_harness import audit
    from accumulation_harness.audit.report import Problem

    train, asked = _asked(given)
    random.seed(0)  # code that seeds nothing gets the same numbers in every audit
    np.random.seed(0)
    if HAS_TORCH:
        import torch

        torch.manual_seed(0)
    report = (
        audit.audit_launched(train, replicas=given.replicas, **asked)
        if given.launched
        else audit.audit(train, processes=given.processes, **asked)
    )
    if report is None:
        return None
    if given.read and not all(_is_as_read(line, by_name=".py:" in given.read) for line in report.lines):
        what = f"its windows are not those that {given.read} should give"
        how = "say by --set, --set-env or --set-file how the script gets the two numbers"
        report = replace(report, results=(), problems=(*report.problems, Problem(f"{what}: {how}")))
    read = [f"as its text shows, {given.train} got the two numbers by {given.read}"] if given.read else []
    notes = (*read, *report.notes, *train.remarks, *([] if report.results or read else train.advice))
    return replace(report.seen_as(train.there), notes=notes)


def read_script(given: argparse.Namespace) -> None:
    """Take the options for the two numbers from the script's text, if none are given and the text shows both.

    Args:
        given: The parsed command line.
    """
    from accumulation_harness.audit.user_code.asking import advised
    from accumulation_harness.audit.user_code.target import Target

    if given.set or given.set_env or given.set_file:
        return
    with suppress(ValueError):  # of what is not there, and refused later
        target = Target.of(given.train)
        given.read = "" if target.name else advised(target.file(), given.rest)
    words = shlex.split(given.read)
    for option, text in zip(words[::2], words[1::2], strict=True):
        getattr(given, option.strip("-").replace("-", "_")).append(text)


def _is_as_read(line: Line, *, by_name: bool) -> bool:
    """Whether windows of the reference hold as many rows as were asked for, or a multiple, and most others N micro-batches.

    A model may be called several times with the rows of a micro-batch (a discriminator, two views), and by several ranks.
    An option that the loop does not follow is a fault of the loop; a number in the source of such a name may be another one.

    Returns:
        True if the options were read as the script means them.
    """
    n, seen = line.arm.accumulation_steps, line.facts.run
    has_rows = all(step.num_rows % seen.reference.run.batch_size == 0 for step in seen.reference.effective[:1])
    whole = sum(count > 0 and count % n == 0 for count in seen.mine.backwards)
    return has_rows and (not by_name or 2 * whole >= seen.mine.steps)


def _asked(given: argparse.Namespace) -> tuple[UserCode, dict[str, Any]]:
    """The code, and what is asked of it."""
    from accumulation_harness.audit.user_code.call import load
    from accumulation_harness.audit.user_code.settings import Settings

    settings = Settings.of(given.set, given.set_env, given.set_file, given.rest)
    train = load(given.train, settings, in_place=given.in_place)
    return train, {
        "batch_size": given.batch_size,
        "accumulation_steps": given.accumulation_steps,
        "reference": load(given.reference, in_place=given.in_place) if given.reference else None,
        "max_steps": MAX_STEPS if given.max_steps is None and train.target.name else given.max_steps,
        "allow": given.allow,
        "progress": (lambda line: None) if given.rank else _tell,
    }


def _told(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}").removesuffix(":")


def _tell(line: str) -> None:
    """Progress goes beside what is asked for, as it comes; the audited code may have closed stderr."""
    with suppress(OSError, ValueError):
        print(f"audit: {line}", file=sys.stderr, flush=True)


def subject_of(given: argparse.Namespace) -> Subject:
    """What the command line asks for, before the audited code can change the working folder.

    Args:
        given: The parsed command line.

    Returns:
        Files, functions and settings, with absolute paths.
    """
    from accumulation_harness.audit.report.subject import Place, Subject

    return Subject(
        train=Place.of(given.train),
        reference=Place.of(given.reference) if given.reference else None,
        batch_size=given.batch_size,
        accumulation_steps=given.accumulation_steps,
        processes=given.processes,
        launched=given.launched,
        replicas=given.replicas,
        settings=_settings(given),
        folder=Path.cwd(),
    )


def _settings(given: argparse.Namespace) -> tuple[str, ...]:
    pairs = zip(SETS, (given.set, given.set_env, given.set_file), strict=True)
    words = [word for option, texts in pairs for text in texts for word in (option, text)]
    words += ["--in-place"] if given.in_place else []
    return (*words, *(["--", *given.rest] if given.rest else []))


def _written(given: argparse.Namespace, report: Report) -> str:
    """A line per page and issue, once it is written."""
    paths = [report.save(path) for path in given.save]
    if given.report is not None:
        paths.append(report.save(given.report, "issue"))
    return "".join(f"saved {path}\n" for path in paths)


def refused(given: argparse.Namespace, subject: Subject, what: str) -> tuple[int, str, str]:
    """Answer where nothing was judged.

    Of several ranks, the one that judges says what became of the others, and the exit code.

    Args:
        given: The command line.
        subject: What was to be audited.
        what: One line that says why.

    Returns:
        Exit code, stdout and stderr: where text is not asked for, stdout is a report with that problem.
    """
    from accumulation_harness.audit.report import Problem, Report

    if given.rank:
        return 0, "", f"rank {given.rank}: {what}\n"
    report = Report(batch_size=given.batch_size, results=(), problems=(Problem(what),), hidden=(), subject=subject)
    return _answer(given, report, what)


def _answer(given: argparse.Namespace, report: Report, error: str = "") -> tuple[int, str, str]:
    """What is said of a report, and written; `error`: in place of its text, where nothing was judged."""
    from accumulation_harness.audit.report import github

    code, said, remarks = report.exit_code, "" if error and given.format == "text" else report.told(given.format), ""
    try:
        remarks = github.tell(report)
        remarks += _written(given, report)
    except BaseException as unsaved:  # a signal too: what was judged is told
        code, error = BAD_INPUT, "\n".join(filter(None, (error, f"audit could not be saved: {_told(unsaved)}")))
    return code, *_streams(given.format, said, remarks, error)


def _streams(format: Format, said: str, remarks: str, error: str = "") -> tuple[str, str]:
    """Stdout and stderr: remarks go beside the error where stdout holds another format than text."""
    out = [said, remarks] if format == "text" else [said]
    err = [error] if format == "text" else [remarks, error]
    return _lines(out), _lines(err)


def _lines(texts: Sequence[str]) -> str:
    return "".join(text.rstrip("\n") + "\n" for text in texts if text)


def _import() -> None:
    """What every audit takes. Its objects stay: the garbage collector looks at them neither now nor later."""
    gc.disable()
    import accumulation_harness.audit.report.github  # noqa: F401
    import accumulation_harness.audit.session  # noqa: F401

    if HAS_TORCH:
        import accumulation_harness.audit.observe.torch_run  # noqa: F401

        dynamo.postpone()
    gc.freeze()
    gc.enable()


def main(descriptor: int, arguments: Sequence[str]) -> None:
    """Judge, and hand over the answer; what the audited code has left to be done at its end comes after that.

    Args:
        descriptor: An open file descriptor, to which the answer is written as JSON.
        arguments: Words of the command line.
    """
    if "PYTHONSAFEPATH" not in os.environ:  # our modules were to be found before the folder's
        sys.path.insert(0, os.getcwd())
    given = parsed(arguments)
    os.dup2(2, 1)  # what the audited code prints is no result
    _import()
    answer = json.dumps(judge(given)).encode()
    with suppress(OSError):  # the audited code has closed it: then there is no answer
        Connection(descriptor).send_bytes(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
