"""Does the critical batch size grow along a training?"""

from accumulation_harness.config import OptimizerName, ScheduleName
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

QUESTION = Question(
    place=120,
    studies={
        "critical_batch": Study(
            needs=(
                EQUAL_SPLIT,
                Need("steps", lambda c: c.steps >= 8, "8 or more: a branch is an eighth of the training"),
                Need("accumulation_steps", lambda c: max(c.accumulation_steps) > 1, "some N above 1: a smaller batch"),
                Need(
                    "schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: branches begin at all points"
                ),
                Need("schedule.warmup_steps", lambda c: c.schedule.warmup_steps == 0, "0: every branch would warm up again"),
                Need(
                    "optimizer.name",
                    lambda c: c.optimizer.name != OptimizerName.custom,
                    "one of ours, whose rate for B / N is known",
                ),
            ),
            loss=lambda row: (ArmName("trunk"), row["trunk_end"]),
        )
    },
)
