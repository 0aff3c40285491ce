"""What does BatchNorm do to an accumulated step, and what can be done about it?"""

from accumulation_harness.config import Execution, Norm, Precision
from accumulation_harness.config.questions import Need, Question, Study

_OF_REMEDIES = (
    Need("norm", lambda c: c.norm in (Norm.batch, Norm.as_is), "batch: the remedies are BatchNorm's"),
    Need("execution", lambda c: c.execution != Execution.cuda_graph, "eager or compile: a remedy works inside the forward"),
)

QUESTION = Question(
    place=30,
    core=True,
    studies={
        "batch_statistics": Study(
            needs=(Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),)
        ),
        "remedies": Study(needs=_OF_REMEDIES),
        "fine_tuning": Study(needs=_OF_REMEDIES),
    },
)
