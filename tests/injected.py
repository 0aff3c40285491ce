"""Faults at every call: an error, a full disk, a kill at the n-th call to the system, for every n, and at two of them.

`python -m tests.injected [--faults 10000] [--seed 0]` is the campaign; `tests/test_injected.py` is a part of it. A call is what
Python tells its audit hooks (open, rename, remove, mkdir, listdir, ...), a write, or a sync. After each fault the same work is
done again without one: what was finished is as it was (not lost, not altered, not made twice), what was not has been told (not
silent), and the work comes to its end (no hang).
"""

import argparse
import errno
import gc
import io
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from accumulation_harness.results import measurements, sweeps
from accumulation_harness.results.measurements import Measurement, Measurements
from accumulation_harness.results.store import State, Store, TrialTaken
from accumulation_harness.sweep import verify
from accumulation_harness.system import files

CALLS = ("open", "os.", "shutil.", "tempfile.")
KINDS = {"error": errno.EIO, "full disk": errno.ENOSPC, "kill": 0}
SUMMARY = {"arms": [], "environment": {}, "seconds": {}}
ROWS = [{"step": step, "loss": step / 3} for step in range(4)]


class Killed(BaseException):
    """Nothing that the process would do any more is done."""


class Disk:
    """Counts calls while it is on; the ones in `bad` fail, and after a kill all others do."""

    def __init__(self):
        self.on, self.calls, self.bad, self.is_dead = False, 0, {}, False

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

    def hear(self, event, arguments):
        if self.on and event.startswith(CALLS) and not (event == "open" and not str(arguments[0]).startswith(self.root)):
            self.call()

    @contextmanager
    def failing(self, root, bad):
        self.calls, self.bad, self.is_dead, self.root, self.on = 0, dict(bad), False, str(root), True
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
        sys.addaudithook(disk.hear)
        fsync = os.fsync
        os.fsync = lambda descriptor: (disk.call(), fsync(descriptor))[1]
        files.open = Opened  # what `write_atomically` writes to


class Opened(io.FileIO):
    def write(self, content):
        disk.call()
        return super().write(content)


def store_a_trial(root):
    """One more beside one that is finished; a process that has it, or has had it, is as good."""
    try:
        with Store(root).open_trial("e", "new", {}) as writer:
            writer.add(*ROWS)
            writer.finish(SUMMARY)
    except TrialTaken as taken:
        assert taken.state == State.finished


def trial_is_done(root):
    return Store(root).finished("e", "new")


def share_a_measurement(root):
    assert Measurements(root, "e/new").of(measurement()) == {"a": 1.0}


def measurement():
    return Measurement("algebra", dict[str, float], lambda: {}, lambda: {"a": 1.0})


def measurement_is_done(root):
    return measurements.is_whole(root / measurements.FOLDER / measurement().identity)


def announce_a_sweep(root):
    sweeps.announce(root, ["e/new", "e/old"])


def tell_a_failure(root):
    Store(root).mark_failed("e", "new", "no such luck")


def failure_is_told(root):
    return any(one.trial == "new" and one.state == State.failed and one.detail == "no such luck" for one in Store(root).status())


WORK = {  # what is done; whether it is done; whether it may be left undone in silence
    "trial": (store_a_trial, trial_is_done, False),
    "measurement": (share_a_measurement, measurement_is_done, True),  # whoever needs it measures
    "note": (announce_a_sweep, lambda root: bool(sweeps.announced(root)), True),  # for whoever watches
    "failure": (tell_a_failure, failure_is_told, False),
}


def made(root):
    """A store with one finished trial."""
    with Store(root).open_trial("e", "old", {}) as writer:
        writer.add(*ROWS)
        writer.finish(SUMMARY)
    return snapshot(root / "e" / "old")


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def struck(work, bad):
    """Do the work under these faults, and again without; what was wrong, in words, and how many calls there were."""
    do, is_done, may_be_silent = WORK[work]
    root = Path(tempfile.mkdtemp(prefix="injected-"))
    try:
        old, told = made(root), False
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                with disk.failing(root, bad):
                    do(root)
            except (Exception, Killed):
                told = True
        calls, was_done = disk.calls, is_done(root)
        wrong = []
        if snapshot(root / "e" / "old") != old:
            wrong.append("lost or altered")
        if not (was_done or told or seen or may_be_silent):
            wrong.append("silent")
        before = (root / "e" / "new" / "trial.json").stat() if work == "trial" and was_done else None
        began = time.monotonic()
        do(root)
        if time.monotonic() - began > 5:
            wrong.append("hung")
        if not is_done(root):
            wrong.append("never done")
        if before is not None and (root / "e" / "new" / "trial.json").stat().st_ino != before.st_ino:
            wrong.append("repeated")
        if work == "trial" and Store(root).steps(next(Store(root).trials("e"))).to_dict("records") != ROWS:
            wrong.append("other rows")
        wrong += [line for status in Store(root).status() for line in verify.of_trial(Store(root), status)]
        return wrong, calls
    finally:
        shutil.rmtree(root)


def campaign(number, seed):
    """Each kind at every call once, then pairs of them at random; counts by what was wrong."""
    generator, faults, found = random.Random(seed), 0, Counter()
    calls = {work: struck(work, {})[1] for work in WORK}
    todo = [(work, {n: kind}) for work in WORK for n in range(1, calls[work] + 1) for kind in KINDS]
    while faults < number or todo:
        if todo:
            work, bad = todo.pop()
        else:
            work = generator.choice([*WORK])
            bad = {generator.randint(1, calls[work]): generator.choice([*KINDS]) for _ in range(2)}
        wrong, _ = struck(work, bad)
        faults += len(bad)
        found.update(wrong)
        for one in wrong:
            print(f"{work} {bad}: {one}", flush=True)
    return faults, calls, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    install()
    if cannot := [work for work in WORK if struck(work, {})[0]]:
        print(f"cannot start: without a fault these fail: {', '.join(cannot)}", file=sys.stderr)
        sys.exit(3)
    faults, calls, found = campaign(options.faults, options.seed)
    print(f"{faults} faults over {calls} calls: {dict(found) or 'nothing lost, repeated, silent or hung'}")
    sys.exit(bool(found))
