"""Do released trainers accumulate rightly? Decided by the audits that `make audit-<name>` writes beside the results."""

from __future__ import annotations

from accumulation_harness.questions import Question

QUESTION = Question(place=230)
