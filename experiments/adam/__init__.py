"""Is Adam's state that of the full batch? And what does Adam make of a gradient that is N times too large?"""

from accumulation_harness.config.questions import Need, Question, Study

KNOWN = ("sgd", "momentum", "nesterov", "adam", "adamw")
QUESTION = Question(
    place=80,
    core=True,
    studies={
        "adam_scale": Study(
            needs=(Need("optimizer.name", lambda c: c.optimizer.name in KNOWN, "one whose first update has a closed form"),)
        ),
    },
)
