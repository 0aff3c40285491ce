"""pytest: the fixture `audit_accumulation`, an audit whose failure fails the test and prints the findings.

`@pytest.mark.accumulation(batch_size=32, accumulation_steps=(4, 16), allow={"stochastic_layers"})` gives its options, and
`pytest -m accumulation` selects the tests that have it. `--audit-json=DIR` writes what every audit concluded. torch is imported
where the fixture is used, and nowhere else: every session of the environment imports this file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from accumulation_harness.audit.report import Report

MARKER, FOLDER = "accumulation", "--audit-json"


class AccumulationChanged(AssertionError):
    """Raised by `audit_accumulation` if the function is not equivalent or could not be judged; the message is the report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--audit-json=DIR`."""
    group = parser.getgroup("accumulation audit")
    group.addoption(
        FOLDER, metavar="DIR", type=Path, help="write what every audit of `audit_accumulation` concluded as JSON to DIR"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker, for `--strict-markers`."""
    config.addinivalue_line(
        "markers", f"{MARKER}(**options): an audit of gradient accumulation, and options of `audit_accumulation`"
    )


@pytest.fixture
def audit_accumulation(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """A fixture: an audit that fails the test unless its verdict is `equivalent`.

    Call it as `audit_accumulation(train, batch_size=32, accumulation_steps=(4, 16))`, with the arguments of `audit`. Those that
    are left out are taken from the marker `accumulation`.

    Args:
        request: pytest's request of the test.

    Returns:
        A function that returns the report, and raises `AccumulationChanged` if the verdict is not `equivalent`.
    """
    marker = request.node.get_closest_marker(MARKER)
    usual: dict[str, Any] = dict(marker.kwargs) if marker else {}
    folder: Path | None = request.config.getoption(FOLDER)
    node = request.node.nodeid
    name = re.sub(r"[^\w.-]+", "_", node)
    if node.count("::") > 1 or name != node.replace("::", "_"):  # as that of another test may be
        name += f"-{hashlib.sha256(node.encode()).hexdigest()[:6]}"
    done: list[Report] = []

    def run(train: Callable[..., Any], **options: Any) -> Report:
        __tracebackhide__ = True
        from accumulation_harness.audit.session import audit

        report = audit(train, **{**usual, **options})
        done.append(report)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            report.save(folder / f"{name}{f'-{len(done)}' if len(done) > 1 else ''}.json")
        if not report.equivalent:
            raise AccumulationChanged(f"\n{report}")
        return report

    return run
