"""Faults at every call: an error, a full disk, a kill at the n-th call to the system, for every n.

A call is what Python tells its audit hooks about a path (open, rename, remove, mkdir, listdir, ...), a write, or a sync; of a
write that fails one half is written. After each fault every file is the old one or the new one, whole (not lost, not altered),
nothing half-written is left but by a kill, and what was not done has been told: by an exception, a warning, or a command's exit
code and last line (not silent). The same work is then done again without a fault, and ends where it would have ended (not
repeated, no hang).
"""

import builtins
import errno
import gc
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from accumulation_harness.analysis import report, sync
from accumulation_harness.audit import audit, command
from accumulation_harness.config import TrackingConfig
from accumulation_harness.lint.__main__ import main as lint
from accumulation_harness.results import sweeps
from accumulation_harness.results.measurements import Measurement, Measurements
from accumulation_harness.results.store import LOCKS, State, Store, TrialTaken
from accumulation_harness.sweep import status, verify
from accumulation_harness.system.files import PARTIAL
from accumulation_harness.system.terminal import BAD_INPUT
from accumulation_harness.watch import watch
from accumulation_harness.watch.report import FORMAT
from tests.audit.loops import wrong_loops
from tests.audit.loops.wrong_loops import mean_of_means
from tests.stored_trials import store_trial

CALLS = ("open", "os.", "shutil.", "tempfile.")
KINDS = {"error": errno.EIO, "full disk": errno.ENOSPC, "kill": 0}
SUMMARY = {"arms": [], "environment": {}, "seconds": {}}
ROWS = [{"step": step, "loss": step / 3} for step in range(4)]
MOST_SECONDS = 30  # that work may take beside ten times what it takes undisturbed
_open, _files = io.open, report.files


class Killed(BaseException):
    """Nothing that the process would do any more is done."""


class Told(Exception):
    """A command's exit code and last line say that something went wrong."""


class Disk:
    """Counts calls about what is below a folder while it is on; the ones in `bad` fail, and after a kill all others do."""

    def __init__(self):
        self.on, self.calls, self.bad, self.is_dead, self.below = False, 0, {}, False, ""

    def call(self):
        if not self.on:
            return
        self.calls += 1
        if self.is_dead or self.bad.get(self.calls) == "kill":
            self.is_dead = True
            raise Killed
        if self.calls in self.bad:
            code = KINDS[self.bad[self.calls]]
            raise OSError(code, os.strerror(code), "injected")

    def has(self, path):
        return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(self.below)

    def hear(self, event, arguments):
        if self.on and event.startswith(CALLS) and any(map(self.has, arguments)):
            self.call()

    @contextmanager
    def failing(self, below, bad):
        self.calls, self.bad, self.is_dead, self.below, self.on = 0, dict(bad), False, str(below), True
        try:
            yield
        finally:
            self.on = False
            if self.is_dead:
                gc.collect()  # the kernel closes what a dead process has open


disk = Disk()
_installed = []


def install():
    if not _installed:
        _installed.append(True)
        logging.raiseExceptions = False  # W&B's log of its own
        sys.addaudithook(disk.hear)
        fsync = os.fsync
        os.fsync = lambda descriptor: (disk.call(), fsync(descriptor))[1]
        builtins.open = io.open = opened


def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
    """What is opened for writing below the folder can fail at every write."""
    if not disk.on or not disk.has(file) or not set(mode) & set("wxa+"):
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw = Raw(file, mode.replace("b", "").replace("t", ""))
    binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return binary if "b" in mode else io.TextIOWrapper(binary, encoding or "utf-8", errors, newline)


class Raw(io.FileIO):
    def write(self, content):
        try:
            disk.call()
        except BaseException:
            super().write(content[: len(content) // 2])
            raise
        return super().write(content)


@dataclass(frozen=True)
class Work:
    """Something that is to be done below a folder: what is there before, and what a command says of it."""

    do: Callable[[Path], str | None]
    prepare: Callable[[Path], object]
    below: str = ""  # where calls fail
    may_be_silent: bool = False  # whether it may be left undone in silence
    tells: str = "$^"  # files that may themselves say that something went wrong
    wrong: Callable[[Path], Iterable[str]] = lambda root: ()  # what else must be right of the folder, whatever happened
    once: str = "nothing"  # what is not written again where it is done


def run(main, *arguments):
    """What a command says where all is well; Told what it says otherwise."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(one) for one in arguments])
    if err.getvalue().strip():
        raise Told(err.getvalue())
    return f"{code}\n{out.getvalue()}"


# The works ---------------------------------------------------------------------------------------------------------------------


def finish(root, name):
    with Store(root).open_trial("e", name, {}) as writer:
        writer.add(*ROWS)
        writer.finish(SUMMARY)


def store_a_trial(root):
    """One more beside one that is finished; a process that has it, or has had it, is as good."""
    try:
        finish(root, "new")
    except TrialTaken as taken:
        assert taken.state == State.finished


def share_a_measurement(root):
    measurement = Measurement("algebra", dict[str, float], lambda: {}, lambda: {"a": 1.0})
    assert Measurements(root, "e/new").of(measurement) == {"a": 1.0}


def announce_a_sweep(root):
    sweeps.announce(root, ["e/new", "e/old"])


def tell_a_failure(root):
    Store(root).mark_failed("e", "new", "no such luck")


def before_a_report(root):
    """A report of one trial, and a second trial."""
    store_trial(root / "results")
    run(report.main, "--results", root / "results", "--out", root / "reports")
    store_trial(root / "results", norm="batch")


def write_a_report(root):
    return run(report.main, "--results", root / "results", "--out", root / "reports")


@cache
def files_of_a_report(norms):
    with tempfile.TemporaryDirectory() as scratch:
        for norm in norms:
            store_trial(Path(scratch), norm=norm)
        return _files(Path(scratch))


def write_the_files(root, norms=("none", "batch")):
    """The part of the command that writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "files", lambda results: files_of_a_report(norms))
        return run(report.main, "--results", root / "results", "--out", root / "reports")


def two_trials(root):
    for norm in ("none", "batch"):
        store_trial(root / "results", norm=norm)
    Store(root / "results").mark_failed("equivalence", "failed", "no such luck")
    sweeps.announce(root / "results", ["equivalence/waiting"])


@cache
def audited():
    """What an audit found of a loop that is wrong."""
    return audit(mean_of_means, batch_size=16, accumulation_steps=(4,))


def refused():
    raise ValueError("no such loop")


SAVED = ("a.json", "a.md", "a.xml", "a.sarif", "a.svg")


def save_an_audit(root, found=audited):
    """All formats of an audit, as the command saves them once the code has been run; an issue runs code of its own."""
    options = [f"{wrong_loops.__file__}:mean_of_means", "--batch-size", "16", "--accumulation-steps", "4"]
    options += [word for name in SAVED for word in ("--save", str(root / name))]
    options += ["--report", str(root / "issue.md")] if found is refused else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_audited", lambda given: found())
        try:
            code, out, err = command.judge(command.parsed(options))
        except OSError:
            return "a traceback"  # which is no sentence, and hides why nothing was judged
    if "could not be saved" in err + out:
        assert code == BAD_INPUT, "a verdict that was not saved"
        raise Told(err + out)
    return f"{code}\n{out}\n{err}"


def old_audit(root):
    for name in (*SAVED, "issue.md", "watch.json"):
        (root / name).write_text("of an earlier run\n")


LOOP = """\
for i, x in enumerate(batches):
    loss = model(x).mean()
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def mend_a_file(root):
    return run(lint, "--fix", "--write", root / "loop.py")


def watch_a_run(root):
    """A run that goes on whatever becomes of its watch, whose report says what did."""
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 3), torch.randn(24, 4), torch.randint(0, 3, (24,))
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.1), io.StringIO()
    with watch(model, optimizer, path=root / "watch.json", tell=said) as seen:
        for start in range(0, 24, 4):
            optimizer.zero_grad()
            for k in (start, start + 2):
                (functional.cross_entropy(model(x[k : k + 2]), y[k : k + 2]) / 2).backward()
            optimizer.step()
    found = seen.report()
    if "injected" in said.getvalue() + str(found):
        raise Told(str(found))
    return found.headline


def sync_a_sweep(root):
    """The sweep's own run, with W&B itself, offline; W&B's process writes its log, and is not failed here."""
    return "".join(sync.sweep_runs(root / "results", TrackingConfig()))


def whole_log(root):
    """What is marked as done has a log with the table and the figures."""
    for done in (root / "results" / sweeps.FOLDER).glob(f"*/{sync.DONE}"):
        logs = [path.read_bytes() for path in done.parent.glob(f"wandb/{sync.LOGS}")]
        if len(logs) != 1 or b"verdicts" not in logs[0] or b"media/images" not in logs[0]:
            yield f"{done.parent.name} is marked as done, with {len(logs)} logs"


def whole_report(root):
    """That of a watch is one, of whatever window, or that of an earlier run."""
    text = (root / "watch.json").read_text()
    if not text.startswith("of an earlier run") and json.loads(text)["format"] != FORMAT:
        yield "watch.json is no report"


def whole_store(root):
    """What `verify` says of it, and that it says what a kill has left."""
    store = Store(root)
    yield from (line for one in store.status() for line in verify.of_trial(store, one))
    yield from (line for line in verify.beside_trials(root) if "killed" not in line)


WORK = {
    "trial": Work(store_a_trial, partial(finish, name="old"), tells="failed.json", once="e/new/trial.json", wrong=whole_store),
    "measurement": Work(share_a_measurement, partial(finish, name="old"), may_be_silent=True, wrong=whole_store),  # or it is made
    "note": Work(announce_a_sweep, partial(finish, name="old"), may_be_silent=True, wrong=whole_store),  # for whoever watches
    "failure": Work(tell_a_failure, partial(finish, name="old"), wrong=whole_store),
    "audit": Work(save_an_audit, old_audit),
    "refused audit": Work(partial(save_an_audit, found=refused), old_audit),
    "watch": Work(watch_a_run, old_audit, tells="watch.json", wrong=whole_report),
    "lint": Work(mend_a_file, lambda root: (root / "loop.py").write_text(LOOP)),
    "report": Work(write_the_files, partial(write_the_files, norms=("none",))),
    "report reads": Work(write_a_report, before_a_report, below="results", tells="reports/"),
    "status": Work(lambda root: run(status.main, "--results", root / "results"), two_trials),
    "verify": Work(lambda root: run(verify.main, "--results", root / "results"), two_trials),
    "sync": Work(sync_a_sweep, two_trials, wrong=whole_log),
}
SLOW = ("refused audit", "watch", "report reads", "sync")  # a second or more each


# What is right -----------------------------------------------------------------------------------------------------------------

_TIMES = re.compile(rb'"(time|started|[^"\n]*(second|peak_bytes)[^"\n]*)": [^,}\n]*')


def snapshot(root):
    """Every file that somebody may read, but for times in it; not locks, and nothing of W&B's own."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    skipped = re.compile(rf"{LOCKS}/|\.lock$|/wandb/|\.filelock-probe-")
    return {name: _TIMES.sub(b"", path.read_bytes()) for name, path in found.items() if not skipped.search(name)}


@cache
def undisturbed(name):
    """A folder before the work, what is in it before and after, what is said, how many seconds and calls it takes."""
    work = WORK[name]
    before, after = (Path(tempfile.mkdtemp(prefix="injected-")).resolve() for _ in range(2))
    work.prepare(before)
    shutil.copytree(before, after, dirs_exist_ok=True, symlinks=True)
    began = time.monotonic()
    with disk.failing(after / work.below, {}):
        said = work.do(after)
    assert not [*work.wrong(after)], f"{name}: cannot start"
    return before, snapshot(before), snapshot(after), in_words(said, after), time.monotonic() - began, disk.calls


def in_words(said, root):
    return said and said.replace(str(root), "ROOT")


def struck(name, bad):
    """Do the work under these faults, and again without; what was wrong, in words, and how many calls there were."""
    work, (before, old, new, calm, seconds, _) = WORK[name], undisturbed(name)
    root = Path(tempfile.mkdtemp(prefix="injected-")).resolve()
    try:
        shutil.copytree(before, root, dirs_exist_ok=True, symlinks=True)
        told, said, began = False, None, time.monotonic()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                with disk.failing(root / work.below, bad):
                    said = work.do(root)
            except Exception:
                told = True
            except Killed:
                pass
        told = told or bool(seen) or any(code and os.strerror(code) in (said or "") for code in KINDS.values())
        calls, found = disk.calls, snapshot(root)
        left = [path for path in found if path.endswith(PARTIAL)]
        wrong = [f"left {path}" for path in left if not disk.is_dead and len(bad) == 1]
        wrong += [f"lost {path}" for path in old if path not in found and path in new]
        whole = {path: text for path, text in found.items() if path not in left}
        altered = [path for path, text in whole.items() if text not in (old.get(path), new.get(path))]
        wrong += [f"altered {path}" for path in altered if not re.search(work.tells, path)]
        is_done = whole == new and (in_words(said, root) == calm or disk.is_dead)
        if not (is_done or told or disk.is_dead or work.may_be_silent):
            wrong.append("silent")
        wrong += work.wrong(root) if not left else ()
        once = [path.stat().st_ino for path in root.glob(work.once) if is_done]
        again = work.do(root)
        if time.monotonic() - began > MOST_SECONDS + 10 * seconds:
            wrong.append("hung")
        end = {path: text for path, text in snapshot(root).items() if not path.endswith(PARTIAL)}
        if end != new or (whole != new and in_words(again, root) != calm):
            wrong.append(f"never done: {[path for path in {*end, *new} if end.get(path) != new.get(path)]}")
        if once and once != [path.stat().st_ino for path in root.glob(work.once)]:
            wrong.append("repeated")
        return [*wrong, *work.wrong(root)], calls
    finally:
        shutil.rmtree(root)
