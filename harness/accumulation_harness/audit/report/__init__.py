from accumulation_harness.audit.report.conclusion import COLUMNS, ArmResult, Problem, Status
from accumulation_harness.audit.report.remedies import remedy
from accumulation_harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Problem", "Report", "Status", "remedy"]
