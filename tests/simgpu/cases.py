"""What is run on the stand-in device: `python -m tests.simgpu.cases NAME ...` prints one line of JSON for each."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from harness import studies
from harness.config import (
    Data,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    Study,
    TrialConfig,
    WorkloadConfig,
)
from tests.simgpu import device

MLP = WorkloadConfig(model=Model.mlp, width=2)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1, width=8)
ADAM, ADAMW = OptimizerConfig(name=OptimizerName.adam, lr=1e-3), OptimizerConfig(name=OptimizerName.adamw, weight_decay=0.1)
MOMENTUM = OptimizerConfig(name=OptimizerName.momentum)
F16, F64 = {"precision": Precision.float16}, {"precision": Precision.float64}
SHORT = {"steps": 2, "algebra_steps": 2}
BASE: dict[str, Any] = {
    "workload": MLP,
    "effective_batch": 16,
    "accumulation_steps": (4,),
    "steps": 3,
    "algebra_steps": 2,
    "probe_every": 2,
    "referee_every": 2,
}
TRIALS: dict[str, dict[str, Any]] = {
    "verdicts": {"clip_norm": 1.0, "ema_decay": 0.9, "optimizer": ADAM},
    "verdicts_float16": {**F16, "clip_norm": 1.0},
    "verdicts_dropout": {"workload": WorkloadConfig(model=Model.mlp, width=2, dropout=0.5)},
    "verdicts_batch_norm": {"workload": WorkloadConfig(), "norm": Norm.batch, **SHORT},
    "verdicts_text": {"workload": TEXT, "norm": Norm.layer, "split": Split.ragged, **SHORT},
    "verdicts_faults": {"faults": ("all",), "optimizer": ADAMW, "clip_norm": 0.4, **SHORT},
    "verdicts_pairs": {"workload": WorkloadConfig(data=Data.pairs, model=Model.mlp, width=2)},
    "verdicts_policy": {"workload": WorkloadConfig(data=Data.policy, model=Model.mlp, width=2)},
    "verdicts_ignored": {"workload": WorkloadConfig(data=Data.ignored_labels, model=Model.mlp, width=2, penalty=0.1)},
    "verdicts_weights": {"workload": WorkloadConfig(data=Data.class_weights, model=Model.mlp, width=2)},
}
# Not `replicas`, which refuses any device but the CPU, nor `resumption`: torch loads no subclass of Tensor from a checkpoint.
OF_STUDIES: dict[Study, dict[str, Any]] = {
    Study.convergence: {},
    Study.model_bytes: {},
    Study.memory_and_time: {},
    Study.remedies: {"norm": Norm.batch},
    Study.batch_statistics: {"norm": Norm.batch, **F64},
    Study.optimizer_states: {**F64, "optimizer": ADAM},
    Study.batch_sizes: {},
    Study.optimizer_memory: {**F64, "optimizer": MOMENTUM},
    Study.epoch_tail: F64,
    Study.update_size: F64,
    Study.clipping_threshold: F64,
    Study.adaptive_windows: {**F64, "accumulation_steps": (2, 4)},
    Study.tensor_norms: F64,
    Study.gradient_noise: {},
    Study.adam_scale: {**F64, "optimizer": ADAM, "clip_norm": 0.5},
    Study.second_moment: {**F64, "effective_batch": 512, "steps": 1, "optimizer": ADAM},
    Study.accumulators: {},
    Study.randomness: {**F64, "workload": WorkloadConfig(model=Model.mlp, width=2, dropout=0.5)},
    Study.loss_scaling: F16,
}
TRIALS |= {str(study): {"study": study, **changes} for study, changes in OF_STUDIES.items()}


def trial(name: str) -> dict[str, Any]:
    """The record of a trial on the device, in short: verdicts and measurements."""
    config = TrialConfig(**{**BASE, **TRIALS[name]})
    before = torch.get_rng_state(), device.GENERATOR.get_state()
    with device.entered():
        record = studies.run(config, lambda step, rows: None)
    after = torch.get_rng_state(), device.GENERATOR.get_state()
    return {
        "arms": [(row["arm"], row["verdict"], row["cause"], row["explained"]) for row in record["arms"]],
        "measurements": record.get("measurements", []),
        "device": record["environment"]["device"],
        "generators_kept": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {name: (lambda name=name: trial(name)) for name in TRIALS}


def main(names: list[str]) -> None:
    """Run the cases; what fails is told with its last lines."""
    torch.set_num_threads(1)
    for name in names or list(CASES):
        device.READS.clear()
        started = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = CASES[name]()
        except Exception as error:
            told = traceback.format_exc().strip().splitlines()
            found = {"error": f"{type(error).__name__}: {error}", "trace": told[-14:]}
        found |= {"case": name, "seconds": round(time.monotonic() - started, 2)}
        print(json.dumps(found, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
