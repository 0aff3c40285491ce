"""Audit anybody's training code: does gradient accumulation change the computation, and why?"""

from harness.audit.evidence import Finding
from harness.audit.report import Report
from harness.audit.session import audit

__all__ = ["Finding", "Report", "audit"]
