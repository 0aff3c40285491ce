"""Is Muon's update of the accumulated gradient that of the full batch, and what if every micro-batch is orthogonalised alone?"""

from accumulation_harness.config import Precision
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

MUON = "accumulation_harness.recipes.muon:MuonAndAdam"

QUESTION = Question(
    place=150,
    studies={
        "muon": Study(
            needs=(
                EQUAL_SPLIT,
                Need("optimizer.label", lambda c: c.optimizer.label == MUON.partition(":")[2], f"target={MUON}"),
                Need("precision", lambda c: c.precision != Precision.float16, "one without a loss scale"),
            )
        )
    },
)
