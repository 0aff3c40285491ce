"""How noisy is the gradient of a batch?"""

from accumulation_harness.config import Data
from accumulation_harness.config.questions import OWN_GRADIENTS, Need, Question, Study

QUESTION = Question(
    place=160,
    studies={
        "gradient_noise": Study(
            needs=(
                *OWN_GRADIENTS,
                Need(
                    "workload.data",
                    lambda c: c.workload.data != Data.custom,
                    "a workload of ours: it differentiates sample by sample",
                ),
                Need("accumulation_steps", lambda c: c.accumulation_steps[0] > 1, "two or more micro-batches to begin with"),
            )
        )
    },
)
