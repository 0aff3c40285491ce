"""By what must the loss of a micro-batch be divided, and what becomes of an epoch's last micro-batches?"""

from accumulation_harness.config import COUPLED
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

QUESTION = Question(
    place=20,
    core=True,
    studies={
        "epoch_tail": Study(
            needs=(
                EQUAL_SPLIT,
                Need("workload.penalty", lambda c: c.workload.penalty == 0, "0: the loop is written without"),
                Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss that is a mean over samples"),
            )
        ),
        "update_size": Study(),
    },
)
