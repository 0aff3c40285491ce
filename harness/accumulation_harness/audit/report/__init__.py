from accumulation_harness.audit.report.conclusion import COLUMNS, ArmResult, Problem, Unseen
from accumulation_harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Problem", "Report", "Unseen"]
