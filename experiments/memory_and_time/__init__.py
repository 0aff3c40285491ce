"""What does accumulating save in memory, and what does it cost in time?"""

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(place=210, studies={"memory_and_time": Study()})
