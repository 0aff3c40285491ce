"""What does accumulation keep in memory, and is the articles' arithmetic right? Decided by counting bytes, and by calculating."""

from accumulation_harness.config.questions import Question, Study

QUESTION = Question(place=220, studies={"model_bytes": Study()})
