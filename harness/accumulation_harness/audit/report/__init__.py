from accumulation_harness.audit.report.conclusion import COLUMNS, ArmResult, Problem
from accumulation_harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Problem", "Report"]
