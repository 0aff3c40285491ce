"""Does accumulation ask for another learning rate, and does a larger batch?"""

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(place=90, studies={"batch_sizes": Study()})
