"""Tiny trials that are run on the stand-in device; it is not imported here."""

from __future__ import annotations

from typing import Any

from accumulation_harness.config import (
    Data,
    DataConfig,
    LastWindow,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    ScheduleConfig,
    Split,
    WorkloadConfig,
)

MLP = WorkloadConfig(model=Model.mlp, width=2)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1, width=8)
TOWERS = WorkloadConfig(data=Data.docstrings, model=Model.towers, width=4)
ADAM, ADAMW = OptimizerConfig(name=OptimizerName.adam, lr=1e-3), OptimizerConfig(name=OptimizerName.adamw, weight_decay=0.1)
MOMENTUM = OptimizerConfig(name=OptimizerName.momentum)
MUON = OptimizerConfig(name=OptimizerName.custom, target="accumulation_harness.recipes.muon:MuonAndAdam")
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
FAULTS = ("loss_not_divided", "cached_weights_stale", "samples_repeated", "resume_in_window")
TRIALS: dict[str, dict[str, Any]] = {
    "verdicts": {"clip_norm": 1.0, "ema_decay": 0.9, "optimizer": ADAM},
    "verdicts_float16": {**F16, "clip_norm": 1.0},
    "verdicts_dropout": {"workload": WorkloadConfig(model=Model.mlp, width=2, dropout=0.5)},
    "verdicts_batch_norm": {"workload": WorkloadConfig(), "norm": Norm.batch, **SHORT},
    "verdicts_text": {"workload": TEXT, "norm": Norm.layer, "split": Split.ragged, **SHORT},
    "verdicts_faults": {"faults": FAULTS, "optimizer": ADAMW, "clip_norm": 0.4, **SHORT},
    "verdicts_pairs": {"workload": WorkloadConfig(data=Data.pairs, model=Model.mlp, width=2)},
    "verdicts_policy": {"workload": WorkloadConfig(data=Data.policy, model=Model.mlp, width=2)},
    "verdicts_ignored": {"workload": WorkloadConfig(data=Data.ignored_labels, model=Model.mlp, width=2, penalty=0.1)},
    "verdicts_weights": {"workload": WorkloadConfig(data=Data.class_weights, model=Model.mlp, width=2)},
}
# Not `replicas`, which refuses any device but the CPU, nor `resumption`: torch loads no subclass of Tensor from a checkpoint.
OF_STUDIES: dict[str, dict[str, Any]] = {
    "convergence": {},
    "model_bytes": {},
    "memory_and_time": {},
    "remedies": {"norm": Norm.batch},
    "fine_tuning": {"norm": Norm.batch},
    "batch_statistics": {"norm": Norm.batch, **F64},
    "optimizer_states": {**F64, "optimizer": ADAM},
    "batch_sizes": {},
    "optimizer_memory": {**F64, "optimizer": MOMENTUM},
    "epoch_tail": F64,
    "update_size": F64,
    "clipping_threshold": F64,
    "adaptive_windows": {**F64, "accumulation_steps": (2, 4)},
    "tensor_norms": F64,
    "gradient_noise": {},
    "adam_scale": {**F64, "optimizer": ADAM, "clip_norm": 0.5},
    "second_moment": {**F64, "effective_batch": 512, "steps": 1, "optimizer": ADAM},
    "accumulators": {},
    "randomness": {**F64, "workload": WorkloadConfig(model=Model.mlp, width=2, dropout=0.5)},
    "loss_scaling": F16,
    "learning_curves": {"steps": 8},
    "batch_order": {"steps": 8},
    "critical_batch": {"steps": 8},
    "rescaling": {
        "steps": 16,
        "optimizer": ADAMW,
        "ema_decay": 0.9,
        "schedule": ScheduleConfig(warmup_steps=3),
        "data": DataConfig(last_window=LastWindow.drop),
    },
    "muon": {"optimizer": MUON},
    "balance_loss": {"data": DataConfig(last_window=LastWindow.drop)},
    "negatives": {**F64, "workload": TOWERS},
    "retrieval": {"workload": TOWERS},
    "method_memory": {"workload": TOWERS},
}
# What a recipe's steps wait for, at most: float16's scaler; a count that torch's moving average copies; the rows of a loop by
# hand; a study that notes every loss; transformers' masks, and the terms of a task's own.
WAITS_IN_STEPS: dict[str, dict[str, int]] = {
    "waits": {"_local_scalar_dense in recipe.step": 6},
    "training": {"copy of [] in recipe.update_ema": 30},
    "verdicts": {"copy of [] in recipe.update_ema": 39},
    "rescaling": {"copy of [] in recipe.update_ema": 231},
    "verdicts_float16": {"_local_scalar_dense in recipe.step": 45},
    "loss_scaling": {"_local_scalar_dense in recipe.step": 12},
    "every_fault": {"_local_scalar_dense in recipe.step": 2},
    "by_hand": {"_to_copy in hand_written.sample_ids": 64},
    "by_hand_undivided": {"_to_copy in hand_written.sample_ids": 92},
    "example_language_model": {"_local_scalar_dense in custom.num_terms": 96, "_local_scalar_dense in custom.forward": 161},
    "batch_sizes": {
        "_local_scalar_dense in batch_sizes.note": 6,
        "_local_scalar_dense in training.outcome": 6,
    },
}
# Of a study, evaluations and conclusions with them.
READS: dict[str, int] = {
    "convergence": 24,
    "model_bytes": 4,
    "memory_and_time": 12,
    "remedies": 87,
    "fine_tuning": 87,
    "batch_statistics": 496,
    "optimizer_states": 199,
    "batch_sizes": 26,
    "optimizer_memory": 61,
    "epoch_tail": 2996,
    "update_size": 16,
    "clipping_threshold": 55,
    "adaptive_windows": 64,
    "tensor_norms": 34,
    "gradient_noise": 406,
    "adam_scale": 25,
    "second_moment": 10,
    "accumulators": 337,
    "randomness": 382,
    "loss_scaling": 88,
    "learning_curves": 470,
    "batch_order": 78,
    "critical_batch": 86,
    "rescaling": 1998,
    "muon": 1834,
    "balance_loss": 108,
    "negatives": 64,
    "retrieval": 134,
    "method_memory": 28,
}
TRIALS |= {str(study): {"study": study, **changes} for study, changes in OF_STUDIES.items()}
