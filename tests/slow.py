"""Cases that `make test` leaves to `make test-slow`."""

import pytest


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def few(fast, cases):
    """These cases, slow but for the fast ones."""
    return [case if case in fast else slow(*(case if isinstance(case, tuple) else [case])) for case in cases]


def one_in(number, cases):
    return few([*cases][::number], cases)
