"""The W&B mirror: exact, silent on the network when offline, and never able to stop or delay a trial for long.

Every run lives in a child process, as in a sweep: wandb starts a process of its own and hooks the interpreter's exit.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from accumulation_harness.config import ConfigError, HarnessConfig, TrackingConfig, TrackingMode, to_dict
from accumulation_harness.results import tracking
from tests.results.wandb_stand_in import API_KEY, stand_in
from tests.slow import slow

ONLINE = TrackingConfig(mode=TrackingMode.online)
TRIAL = to_dict(HarnessConfig(seed=3))
SUMMARY = {"verdict": "different", "scale": math.nan, "worst": {"residual": math.inf, "rank": [1, math.nan]}}
PREAMBLE = """
import json, math, os, signal, sys, time
from pathlib import Path
from accumulation_harness.results import tracking
from accumulation_harness.config import HarnessConfig, TrackingConfig, to_dict
from tests.results.test_tracking import ROWS, SUMMARY, TRIAL

def open_run(mode, name="trial-1"):
    folder = Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    config = TrackingConfig(mode=tracking.TrackingMode(mode))
    return tracking.open_run(config, TRIAL, experiment="faults", name=name, folder=folder, tags=["a", "b"])
"""


def _rows():
    generator = random.Random(0)
    special = [math.nan, math.inf, -math.inf, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1, 2.0**53 + 2]
    doubles = special + [generator.uniform(-1, 1) * 10.0 ** generator.randint(-300, 300) for _ in range(92)]
    return [{"accumulated/loss": value, "reference/loss": -value, "lr": 0.1} for value in doubles]


ROWS = _rows()


@pytest.fixture
def environment(tmp_path):
    """That of somebody who has never used W&B."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB") and "proxy" not in name.lower()}
    return {**clean, "HOME": str(tmp_path), "PYTHONPATH": f"{Path(__file__).parents[2]}/harness", "PYTHONWARNINGS": "default"}


@pytest.fixture
def server():
    with stand_in() as running:
        yield running


def start(folder, environment, body, *prefix):
    program = PREAMBLE + textwrap.dedent(body)
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", program, str(folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder, environment, body, *prefix, seconds=30):
    """Standard error of a child that ended well within the time."""
    with start(folder, environment, body, *prefix) as child:
        _, errors = child.communicate(timeout=seconds)
    assert child.returncode == 0, errors
    return errors


def online(environment, url):
    return {**environment, "WANDB_BASE_URL": url, "WANDB_API_KEY": API_KEY}


def same(rows, number=None):
    """`rows` are that many of ROWS, bit for bit; repr, because NaN is not equal to itself."""
    assert [row.get("step", row.get("_step")) for row in rows] == list(range(len(ROWS[:number])))
    for row, expected in zip(rows, ROWS[:number], strict=True):
        assert {name: repr(float(row[name])) for name in expected} == {name: repr(value) for name, value in expected.items()}


# Offline

LOG_ALL = """
with open_run("offline") as run:
    for step, row in enumerate(ROWS):
        run.log(step, row)
    run.finish(SUMMARY, {})
"""


def sync(folder, environment, server):
    """Upload the one offline run under the folder, as everybody would."""
    (log,) = folder.rglob("*.wandb")
    command = [sys.executable, "-m", "wandb", "sync", str(log.parent)]
    subprocess.run(command, env=online(environment, server.url), cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("hand_over", "number", "everything"), [(0.0, len(ROWS), True), slow(60.0, 1, False)])
def test_killed_offline_run_keeps_what_was_handed_over(tmp_path, environment, server, hand_over, number, everything):
    """Every row where each is handed over at once; else the last ones wait for a row that comes HAND_OVER_SECONDS later."""
    body = f"""
    tracking.HAND_OVER_SECONDS = {hand_over}
    run = open_run("offline")
    for step, row in enumerate(ROWS):
        run.log(step, row)
        time.sleep(0.005)
    print("logged", flush=True)
    time.sleep(60)
    """
    with start(tmp_path, environment, body) as child:
        assert child.stdout.readline() == "logged\n"
        time.sleep(1.0)
        if everything:
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
    sync(tmp_path, environment, server)
    same(server.history, number)


AUDITED = """
def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print(event, arguments, file=sys.stderr)

sys.addaudithook(hook)
"""


def test_offline_run_asks_nobody(tmp_path, environment):
    """Python by an audit hook, wandb's own process by strace where there is one."""
    assert spoken_to(tmp_path, environment) == []


@pytest.mark.slow
def test_crash_reports_would_ask_somebody(tmp_path, environment):
    """The must-differ of the test above, and the reason for WANDB_ERROR_REPORTING=false."""
    if not _can_trace():
        pytest.skip("strace does not work here, and Python does not see what wandb's own process does")
    assert spoken_to(tmp_path, {**environment, "WANDB_ERROR_REPORTING": "true"}) != []


def spoken_to(folder, environment):
    """Every connection or packet of an offline run that does not stay on this machine."""
    trace = folder / "trace"
    strace = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace)] if _can_trace() else []
    errors = run(folder, environment, AUDITED + textwrap.dedent(LOG_ALL), *strace)
    calls = [line for line in errors.splitlines() if line.startswith("socket.")]
    assert calls, "the hook must see how wandb's own process is reached"
    if strace:
        calls += [line for line in trace.read_text().splitlines() if "AF_INET" in line]
    here = ("family=1,", "127.0.0.1", '"::1"')  # family 1: AF_UNIX
    return [line for line in calls if not any(mark in line for mark in here)]


def _can_trace():
    return (
        shutil.which("strace") is not None
        and subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], check=False).returncode == 0
    )


def test_disabled_mode_and_import_leave_wandb_alone(tmp_path, environment):
    body = """
    tracking.check(TrackingConfig(mode=tracking.TrackingMode.disabled))
    tracking.check(TrackingConfig(mode=tracking.TrackingMode.offline))
    with open_run("disabled") as run:
        run.log(0, {"loss": 1.0})
        run.finish({"verdict": "equivalent"}, {})
    assert "wandb" not in sys.modules
    """
    assert run(tmp_path, environment, body) == ""
    assert list((tmp_path / "trial-1").iterdir()) == []


@pytest.mark.slow
def test_death_of_wandb_does_not_stop_the_trial(tmp_path, environment):
    body = """
    import subprocess
    with open_run("offline") as run:
        run.log(0, {"loss": 1.0})
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        core = [int(pid) for pid in children if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(core) == 1, children
        os.kill(core[0], signal.SIGKILL)
        for step in range(1, 200):
            run.log(step, {"loss": 1.0})
            time.sleep(0.002)
        run.finish({"verdict": "equivalent"}, {})
    print("trained to the end", file=sys.stderr)
    """
    errors = run(tmp_path, environment, body)
    assert "TrackingWarning: W&B mirror" in errors
    assert "trained to the end" in errors


# Online

LOG_ALL_ONLINE = LOG_ALL.replace("offline", "online")


def without_empty(config):
    """The settings as a server has them: W&B sends no empty dictionary."""
    nested = {name: without_empty(value) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: value for name, value in nested.items() if value != {}}


def test_online_rows_arrive_exactly(tmp_path, environment, server):
    assert run(tmp_path, online(environment, server.url), LOG_ALL_ONLINE) == ""
    same(server.history)
    created = server.variables("UpsertBucket")
    assert (created["project"], created["groupName"], created["displayName"]) == (ONLINE.project, "faults", "trial-1")
    assert created["tags"] == ["a", "b"]
    config = {name: item["value"] for name, item in json.loads(created["config"]).items() if name != "_wandb"}
    assert config == without_empty(TRIAL)
    assert server.summary["verdict"] == "different"
    assert server.summary["scale"] == "NaN"
    assert server.completed == [0]


@pytest.mark.slow
def test_exception_in_the_trial_ends_the_run_as_failed(tmp_path, environment, server):
    body = """
    try:
        with open_run("online") as run:
            run.log(0, {"loss": 1.0})
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    """
    run(tmp_path, online(environment, server.url), body)
    assert server.completed == [1]


def test_server_killed_in_mid_run(tmp_path, environment, server):
    body = """
    tracking.FINISH_SECONDS = 2.0
    with open_run("online") as run:
        for step, row in enumerate(ROWS[:50]):
            run.log(step, row)
        print("half", flush=True)
        sys.stdin.readline()
        start = time.monotonic()
        for step, row in enumerate(ROWS[50:], start=50):
            run.log(step, row)
        assert time.monotonic() - start < 1, "logging must not wait for the server"
        run.finish(SUMMARY, {})
    assert time.monotonic() - start < 4, "nor must the end, beyond its limit"
    """
    with start(tmp_path, online(environment, server.url), body) as child:
        assert child.stdout.readline() == "half\n"
        server.kill()
        begin = time.monotonic()
        _, errors = child.communicate("go on\n", timeout=20)
    assert child.returncode == 0, errors
    assert time.monotonic() - begin < 10, "the interpreter's exit must not wait either"
    assert "TrackingWarning: W&B mirror: the end of the run may be missing" in errors
    assert "wandb sync" in errors


@pytest.mark.parametrize("silent", [False, slow(True)], ids=["refused", "silent"])
def test_server_lost_before_the_run_falls_back_to_offline(tmp_path, environment, server, silent):
    if silent:
        server.silent.set()
    else:
        server.kill()
    errors = run(tmp_path, online(environment, server.url), "tracking.INIT_SECONDS = 2.0\n" + LOG_ALL_ONLINE, seconds=15)
    assert "TrackingWarning: W&B mirror: faults/trial-1: no online run" in errors
    assert len(list(tmp_path.rglob("offline-run-*/*.wandb"))) == 1


def test_a_project_that_cannot_be_read(outside):
    outside.setenv("WANDB_API_KEY", "")
    with pytest.raises(ConfigError, match="project=tester/p: expected a W&B project that can be read"):
        next(tracking.read_online("tester/p"))


# The check before a sweep


@pytest.fixture
def outside(environment, monkeypatch):
    """This process in the environment of the children."""
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", environment["HOME"])
    return monkeypatch


def refused(match):
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=match) as caught:
        tracking.check(ONLINE)
    assert time.monotonic() - begin < 20
    assert caught.value.field == "tracking.mode"
    for way_out in ("wandb login", "WANDB_API_KEY", "tracking=offline"):
        assert way_out in str(caught.value)


def test_check_passes_with_a_server_that_knows_the_key(outside, server):
    outside.setenv("WANDB_API_KEY", API_KEY)
    outside.setenv("WANDB_BASE_URL", server.url)
    tracking.check(ONLINE)
    assert server.operations[0][0] == "Viewer"


def test_check_without_a_key(outside):
    refused("No API key configured")


def test_check_with_a_key_that_the_server_does_not_know(outside, server):
    server.knows_key = False
    outside.setenv("WANDB_API_KEY", API_KEY)
    outside.setenv("WANDB_BASE_URL", server.url)
    refused("did not recognize an account")


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
@pytest.mark.parametrize("seconds", [2.0, slow(tracking.CHECK_SECONDS)])
def test_check_without_an_answer(outside, server, silent, seconds):
    outside.setattr(tracking, "CHECK_SECONDS", seconds)
    outside.setenv("WANDB_API_KEY", API_KEY)
    outside.setenv("WANDB_BASE_URL", server.url)
    if silent:
        server.silent.set()
    else:
        server.kill()
    refused("no answer in 2 s" if seconds == 2 else "Failed to verify credentials|no answer in 15 s")
