"""Do released trainers accumulate rightly? Decided by the audits in `scoreboard/`."""

from __future__ import annotations

from accumulation_harness.config.questions import Question

QUESTION = Question(place=230)
