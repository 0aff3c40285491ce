"""What do the formats of the accumulator and of the forward, and loss scaling, do to an accumulated gradient?"""

from accumulation_harness.config import Precision
from accumulation_harness.config.questions import Need, Question, Study

QUESTION = Question(
    place=190,
    core=True,
    studies={
        "accumulators": Study(),
        "loss_scaling": Study(
            needs=(Need("precision", lambda c: c.precision == Precision.float16, "float16: the others have no loss scale"),)
        ),
    },
)
