from harness.audit.report.conclusion import COLUMNS, ArmResult
from harness.audit.report.remedies import remedy
from harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Report", "remedy"]
