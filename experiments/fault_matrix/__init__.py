"""Which check sees which fault of accumulation, and is it called by its name?"""

from accumulation_harness.config.questions import Question

QUESTION = Question(place=240, core=True)
