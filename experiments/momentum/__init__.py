"""Does accumulation disturb momentum? And what changes when N small steps replace one window?"""

from accumulation_harness.config import State, state_of
from accumulation_harness.config.questions import Need, Question, Study

QUESTION = Question(
    place=70,
    core=True,
    studies={
        "optimizer_states": Study(),
        "optimizer_memory": Study(
            needs=(Need("optimizer.name", lambda c: state_of(c.optimizer.name) != State.none, "an optimizer that has a memory"),)
        ),
    },
)
