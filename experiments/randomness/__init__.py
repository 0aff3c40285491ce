"""Does dropout make accumulation a different computation, or only another draw of the same?"""

from accumulation_harness.config import Execution
from accumulation_harness.config.questions import Need, Question, Study

QUESTION = Question(
    place=60,
    studies={
        "randomness": Study(
            needs=(
                Need(
                    "execution",
                    lambda c: c.execution != Execution.cuda_graph,
                    "eager or compile: masks of samples come from the host",
                ),
                Need(
                    "workload.dropout",
                    lambda c: c.workload.dropout > 0,
                    "a positive probability: there is nothing else that draws",
                ),
            )
        )
    },
)
