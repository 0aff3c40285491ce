"""Do released trainers accumulate rightly? Decided by the audits in `scoreboard/`."""

from accumulation_harness.config.questions import Question

QUESTION = Question(place=230)
