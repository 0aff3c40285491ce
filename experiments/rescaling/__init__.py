"""Which hyperparameters have to be rescaled when the batch grows by k?

The rules below were fixed before the first run. A row is a rescaling and a measure; its values are paired differences to the
large batch with everything copied, over seeds, in natural logarithms of a loss: of the distance of the training's curve to the
small batch's, and of the validation loss at equal samples. The averaged weights are what the row `ema` looks at.
The validation set is set aside by the seed and chooses nothing: in some tasks the test set is the same for all seeds.
"""

from accumulation_harness.config import LastWindow, OptimizerName, ScheduleName
from accumulation_harness.config.questions import EQUAL_SPLIT, Need, Question, Study

QUESTION = Question(
    place=130,
    studies={
        "rescaling": Study(
            needs=(
                EQUAL_SPLIT,
                Need(
                    "accumulation_steps",
                    lambda c: len(c.accumulation_steps) == 1 and c.accumulation_steps[0] > 1,
                    "one k above 1",
                ),
                Need("steps", lambda c: c.steps >= 16, "16 or more: a curve has so many points"),
                Need(
                    "optimizer.name",
                    lambda c: c.optimizer.name == OptimizerName.adamw,
                    "adamw: what is rescaled are its settings",
                ),
                Need("ema_decay", lambda c: c.ema_decay is not None, "a decay: the averaged weights are looked at"),
                Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: after the warm-up"),
                Need(
                    "schedule.warmup_steps",
                    lambda c: (c.schedule.warmup_steps + 1) % c.accumulation_steps[0] == 0,
                    "one less than a multiple of k: the large batch warms up over the same samples",
                ),
                Need("data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: all windows are of one size"),
            )
        )
    },
)
