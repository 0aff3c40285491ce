"""Is the balance loss of a mixture of experts, taken per micro-batch, that of the window, and what brings the window's back?"""

from accumulation_harness.config import Data, LastWindow
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

QUESTION = Question(
    place=140,
    studies={
        "balance_loss": Study(
            needs=(
                EQUAL_SPLIT,
                Need("workload.data", lambda c: c.workload.data in (Data.digits, Data.mnist1d), "digits or mnist1d, images"),
                Need(
                    "data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: every micro-batch weighs the same"
                ),
            )
        )
    },
)
