"""Trials that take no time, and whose losses a formula tells: one learning rate is the best of each arm."""

import math
import random

from accumulation_harness.config import to_dict
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.identity import identity
from accumulation_harness.results.store import Store

BEST = {"full": 0.1, "small_batch": 0.4, "small": 0.4, "large": 0.1, "large_then_small": 0.2, "small_then_large": 0.1}
ARMS = {
    "learning_curves": ("full", "accumulated", "permuted", "small_batch"),
    "batch_order": ("large", "small", "large_then_small", "small_then_large"),
    "retrieval": ("full", "small", "grad_cache"),
}


def rated_trial(config):
    """Store measurements of every arm; at the largest rate a training diverges."""
    with Store(config.results).open_trial(config.experiment, identity(config.trial), to_dict(config.trial)) as writer:
        names = (*ARMS[config.study], *config.methods)
        rows = [row for name in names for row in _rows(config, name) if _is_trained(config, row)]
        writer.finish({"arms": [], "measurements": rows, "environment": {}, "seconds": {}})


def _is_trained(config, row):
    """As `learning_curves` has it, the full batch is trained with the arms that have its rate."""
    name = "full" if row["arm"] in ("accumulated", "permuted") else row["arm"]
    return config.trained_arm in (None, str(ArmName(name, 1 if name == "full" else row["accumulation_steps"])))


def _rows(config, name):
    lr, noise = config.optimizer.lr, random.Random(f"{config.seed} {config.optimizer.lr} {name}").gauss(0, 0.01)
    loss = abs(math.log2(lr / BEST.get(name, 0.2))) + 0.5 + noise if lr < 1 else math.nan
    row = {"arm": name, "accumulation_steps": 1 if name == "full" else 4, "micro_batch": 8, "samples": 64,
           "validation_loss": loss, "test_loss": loss, "switch_loss": 1.0, "reciprocal_rank": 1 / (1 + loss),
           "test_accuracy": 0.5, "gap": 0.0, "seconds": 0.1, "rate": lr, "step_samples": 8}  # fmt: skip
    if config.study == "learning_curves":
        row |= {
            f"curve_{what}": [2.0, loss] for what in ("samples", "optimizer_steps", "seconds", "probe_loss", "validation_loss")
        }
    return [row]
