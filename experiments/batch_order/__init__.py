"""Do large batches pay early in a training and small ones late, or the reverse?"""

from accumulation_harness.config import OptimizerName, ScheduleName
from accumulation_harness.config.arm_name import arm_of
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

QUESTION = Question(
    place=110,
    studies={
        "batch_order": Study(
            needs=(
                EQUAL_SPLIT,
                Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: each half has its own"),
                Need(
                    "optimizer.name",
                    lambda c: c.optimizer.name != OptimizerName.custom,
                    "one of ours, whose rate for B / N is known",
                ),
            ),
            loss=lambda row: (arm_of(row), row["validation_loss"]),
            arm_by_arm=True,
        )
    },
)
