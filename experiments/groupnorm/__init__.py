"""Is GroupNorm the better choice with accumulation?"""

from accumulation_harness.config.questions import Question

QUESTION = Question(place=40, core=True)
