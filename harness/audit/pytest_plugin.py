"""pytest fixture `audit_accumulation`: an audit whose failure fails the test and prints the findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.audit.report import Report


class AccumulationChanged(AssertionError):
    """The audited function is not equivalent, or could not be judged; the message is the report."""


@pytest.fixture
def audit_accumulation() -> Callable[..., Report]:
    """`audit_accumulation(train, batch_size=16, accumulation_steps=(4, 16))`: `audit` that fails unless equivalent."""

    def run(train: Callable[..., Any], **options: Any) -> Report:
        __tracebackhide__ = True
        from harness.audit.session import audit  # torch is imported only where the fixture is used

        report = audit(train, **options)
        if not report.equivalent:
            raise AccumulationChanged(f"\n{report}")
        return report

    return run
