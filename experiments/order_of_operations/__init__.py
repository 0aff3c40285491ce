"""What has to happen once per window, and in which order?"""

from accumulation_harness.config.questions import Need, Question, Study

QUESTION = Question(
    place=170,
    studies={
        "clipping_threshold": Study(),
        "resumption": Study(needs=(Need("steps", lambda c: c.steps >= 3, "3 or more: the third window is interrupted"),)),
    },
)
