"""The conclusion as JSON."""

from __future__ import annotations

import json
from typing import Any

from accumulation_harness.audit.report.conclusion import Conclusion, plain
from accumulation_harness.audit.report.remedies import remedy


def document(conclusion: Conclusion) -> dict[str, Any]:
    """In JSON types; numbers that are not finite are None."""
    return {
        "status": conclusion.status,
        "equivalent": conclusion.equivalent,
        "batch_size": conclusion.batch_size,
        "findings": [
            {
                "accumulation_steps": f.accumulation_steps,
                "optimizer_step": f.optimizer_step,
                "cause": f.cause,
                "message": f.message,
                "evidence": plain(f.evidence),
                "remedy": remedy(f.cause),
            }
            for f in conclusion.findings
        ],
        "allowed": [
            {"accumulation_steps": f.accumulation_steps, "cause": f.cause, "message": f.message} for f in conclusion.allowed
        ],
        "problems": list(conclusion.problems),
        "hidden": list(conclusion.hidden),
        "arms": [
            {
                "accumulation_steps": r.accumulation_steps,
                "arithmetic": r.arithmetic,
                "status": conclusion.status_of(r),
                "evidence": plain(r.evidence),
                "causes": sorted({f.cause for f in r.findings}),
            }
            for r in conclusion.results
        ],
        "steps": plain(conclusion.steps),
    }


def text(conclusion: Conclusion) -> str:
    """Strict JSON: a non-finite number is written as null."""
    return json.dumps(document(conclusion), indent=1, allow_nan=False)
