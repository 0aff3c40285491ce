"""One fault of each kind at a call of each kind of work; `python -m tests.injected` has them all, and pairs of them."""

from contextlib import suppress

import pytest

from tests import injected
from tests.injected import WORK


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def installed():
    injected.install()


@pytest.mark.parametrize(("work", "every"), [*((work, 5) for work in WORK), *(slow(work, 1) for work in WORK)])
def test_a_fault_at_any_call_loses_repeats_and_hides_nothing(work, every):
    wrong, calls = injected.struck(work, {})
    assert not wrong and calls > 5, "the campaign cannot start"
    for call in range(1, calls + 1, every):
        kind = [*injected.KINDS][call % 3]
        assert not injected.struck(work, {call: kind})[0], (call, kind)


def test_a_fault_that_is_hidden_would_be_seen(monkeypatch):
    """A writer that takes an error for success."""
    do, is_done, _ = WORK["trial"]

    def careless(root):
        with suppress(Exception):
            do(root)

    monkeypatch.setitem(WORK, "trial", (careless, is_done, False))
    found = [injected.struck("trial", {call: "error"})[0] for call in range(9, 20, 2)]
    assert ["silent"] in found
