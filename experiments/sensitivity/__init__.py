"""Which relative error in the accumulated gradient is the smallest that is found?"""

from accumulation_harness.config.questions import Question

QUESTION = Question(place=260)
