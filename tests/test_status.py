"""The state of a store that real processes write to."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread

import pytest

from accumulation_harness.config import ConfigError
from accumulation_harness.results import sweeps
from accumulation_harness.results.store import State, Store, StoreError, TrialTaken
from accumulation_harness.sweep import status

# A process that claims a trial, says so, and holds it until its input ends.
HOLD = """
import sys
from accumulation_harness.results.store import Store
with Store(sys.argv[1]).open_trial("sweep", sys.argv[2], {}) as writer:
    print("claimed", flush=True)
    sys.stdin.read()
    writer.finish({"arms": [], "environment": {}, "seconds": {}})
"""


def python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(store, trial):
    with store.open_trial("sweep", trial, {}) as writer:
        writer.finish({"arms": [], "environment": {}, "seconds": {}})


def test_every_state_of_a_sweep_that_runs(tmp_path, capsys):
    store = Store(tmp_path)
    sweeps.announce(tmp_path, [f"sweep/{name}" for name in ("a", "b", "c", "d", "e")])
    finish(store, "a")
    store.mark_failed("sweep", "b", "ValueError: no such luck")
    with python(HOLD, tmp_path, "c") as holder:
        assert holder.stdout.readline() == "claimed\n"
        assert status.main(["--results", str(tmp_path)]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[1].split()[:8] == ["sweep", "1", "1", "1", "0", "0", "0", "2"] and "about" in shown[1]
        assert any(line.startswith("running for 0:0") and line.endswith("sweep/c") for line in shown)
        assert "failed: sweep/b: ValueError: no such luck" in shown
        holder.stdin.close()
    assert [one.state for one in store.status()] == [State.finished, State.failed, State.finished]


def test_time_left_is_the_rate_since_the_sweep_began(tmp_path):
    """Two of six were there before, one has finished in the 30 s since: three more at that rate take 90 s."""
    store, now = Store(tmp_path), time.time()
    for number in range(3):
        finish(store, f"t{number}")
    for old in ("t0", "t1"):
        os.utime(tmp_path / "sweep" / old / "trial.json", (now - 500, now - 500))
    asked = [sweeps.Sweep(tuple(f"sweep/t{i}" for i in range(6)), now - 30)]
    found = {f"{one.experiment}/{one.trial}": one for one in store.status()}
    [standing] = status.standings(found, asked, now)
    assert standing.counts == {"finished": 3, "waiting": 3} and standing.left == pytest.approx(90)
    [alone] = status.standings({}, asked, now)
    assert alone.left is None and alone.counts == {"waiting": 6}
    [whole] = status.standings(found, [sweeps.Sweep(("sweep/t0",), now)], now)
    assert whole.left == 0


@pytest.mark.filterwarnings("ignore::accumulation_harness.results.store.StoreWarning")
@pytest.mark.slow
def test_folders_may_be_deleted_while_a_store_is_looked_at(tmp_path):
    """And while trials are claimed and finished in it, and sweeps are announced."""
    store, end, failures = Store(tmp_path), time.monotonic() + 2, []

    def until_the_end(step):
        number = 0
        while time.monotonic() < end:
            try:
                step(number := number + 1)
            except (StoreError, TrialTaken, ConfigError):  # its folder was deleted meanwhile, which is said
                pass
            except Exception as error:
                failures.append(error)
                raise

    def delete(number):
        shutil.rmtree(tmp_path / ("sweep" if number % 5 else ".sweeps"), ignore_errors=True)

    def look(number):
        list(status.lines({one.trial: one for one in store.status()}, sweeps.announced(tmp_path)[0], time.time()))

    def fail(number):
        with suppress(OSError):  # as a sweep does: the others go on
            store.mark_failed("sweep", f"t{number % 3}", "no such luck")

    def store_one(number):
        finish(store, f"t{number % 3}")

    steps = (delete, look, fail, store_one, store_one, lambda number: sweeps.announce(tmp_path, ["sweep/t0"]))
    threads = [Thread(target=until_the_end, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_store_without_trials(tmp_path, capsys):
    assert status.main(["--results", str(tmp_path / "nowhere")]) == 1
    assert "no trials" in capsys.readouterr().err
