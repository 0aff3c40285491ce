"""Audit anybody's training code: does gradient accumulation change the computation, and why?"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accumulation_harness.audit.evidence import Finding
    from accumulation_harness.audit.launch import audit_launched
    from accumulation_harness.audit.report import Report
    from accumulation_harness.audit.session import audit

__all__ = ["Finding", "Report", "audit", "audit_launched"]


def __getattr__(name: str) -> object:
    """The public names, imported when they are used: the command's own process does without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"Finding": "evidence", "Report": "report", "audit": "session", "audit_launched": "launch"}
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
