from accumulation_harness.audit.report.conclusion import COLUMNS, ArmResult, Blind, Problem, Unseen
from accumulation_harness.audit.report.report import Report

__all__ = ["COLUMNS", "ArmResult", "Blind", "Problem", "Report", "Unseen"]
