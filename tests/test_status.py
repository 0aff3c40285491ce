"""The state of a store that real processes write to."""

import os
import subprocess
import sys
import time

import pytest

from accumulation_harness.results import sweeps
from accumulation_harness.results.store import State, Store
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


def test_a_store_without_trials(tmp_path, capsys):
    assert status.main(["--results", str(tmp_path / "nowhere")]) == 1
    assert "no trials" in capsys.readouterr().err
