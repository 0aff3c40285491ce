"""Faults at the calls of each kind of work: at every call, but for a sample of those that take long."""

import builtins
import io
import os
from contextlib import suppress

import pytest

from tests import injected
from tests.injected import WORK
from tests.slow import slow

QUICK = ("trial", "measurement", "note", "failure", "lint", "status", "verify")


@pytest.fixture(autouse=True, scope="module")
def installed():
    found = builtins.open, os.fsync
    injected.install()
    yield
    builtins.open, os.fsync = found
    io.open = builtins.open


@pytest.mark.parametrize(
    ("work", "every"),
    [*((work, 5) for work in QUICK), *(slow(work, 2 if work in injected.SLOW else 1) for work in WORK)],
)
def test_a_fault_at_any_call_loses_repeats_and_hides_nothing(work, every):
    wrong, calls = injected.struck(work, {})
    assert not wrong and calls > 5, "the campaign cannot start"
    for call in range(1, calls + 1, every):
        kind = [*injected.KINDS][call % 3]
        assert not injected.struck(work, {call: kind})[0], (call, kind)


def careless(root):
    """A writer that takes an error for success."""
    with suppress(Exception):
        injected.store_a_trial(root)


def untidy(root):
    """A writer that leaves what it has not finished."""
    path = root / "page.html.7.partial"
    with open(path, "w") as file:
        file.write("new")
    path.rename(root / "page.html")


def direct(root):
    """A writer whose readers see what is half written."""
    (root / "page.html").write_text("new " * 9)


@pytest.mark.parametrize(
    ("do", "said"), [(careless, "silent"), (untidy, "left page.html.7.partial"), (direct, "altered page.html")]
)
def test_a_fault_that_is_hidden_would_be_seen(monkeypatch, do, said):
    name = do.__name__
    monkeypatch.setitem(WORK, name, injected.Work(do, lambda root: (root / "page.html").write_text("old")))
    calls = injected.undisturbed(name)[-1]
    found = [wrong for call in range(1, calls + 1) for wrong in injected.struck(name, {call: "full disk"})[0]]
    assert said in found
