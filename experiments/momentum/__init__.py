"""Does accumulation disturb momentum? And what changes when N small steps replace one window?"""

from __future__ import annotations

from accumulation_harness.config import OptimizerName
from accumulation_harness.questions import Need, Question, Study

QUESTION = Question(
    place=70,
    core=True,
    studies={
        "optimizer_states": Study(),
        "optimizer_memory": Study(
            needs=(Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.sgd, "an optimizer that has a memory"),)
        ),
    },
)
