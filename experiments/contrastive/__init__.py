"""Is accumulation the large batch where negatives come from the batch, and what is worth its memory instead?"""

from accumulation_harness.config import Data, Precision
from accumulation_harness.config.arm_name import arm_of
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

_PAIRS = Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages")
QUESTION = Question(
    place=50,
    studies={
        "negatives": Study(
            needs=(
                Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),
                _PAIRS,
            )
        ),
        "retrieval": Study(
            needs=(_PAIRS,),
            loss=lambda row: (arm_of(row), -row["reciprocal_rank"]),
            arm_by_arm=True,
        ),
        "method_memory": Study(
            needs=(
                EQUAL_SPLIT,
                _PAIRS,
            )
        ),
    },
)
