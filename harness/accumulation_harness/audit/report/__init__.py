from accumulation_harness.audit.report.conclusion import COLUMNS, ArmResult
from accumulation_harness.audit.report.remedies import remedy
from accumulation_harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Report", "remedy"]
