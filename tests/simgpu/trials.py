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
    Study,
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
OF_STUDIES: dict[Study, dict[str, Any]] = {
    Study.convergence: {},
    Study.model_bytes: {},
    Study.memory_and_time: {},
    Study.remedies: {"norm": Norm.batch},
    Study.fine_tuning: {"norm": Norm.batch},
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
    Study.learning_curves: {"steps": 8},
    Study.batch_order: {"steps": 8},
    Study.critical_batch: {"steps": 8},
    Study.rescaling: {
        "steps": 16,
        "optimizer": ADAMW,
        "ema_decay": 0.9,
        "schedule": ScheduleConfig(warmup_steps=3),
        "data": DataConfig(last_window=LastWindow.drop),
    },
    Study.muon: {"optimizer": MUON},
    Study.balance_loss: {"data": DataConfig(last_window=LastWindow.drop)},
    Study.negatives: {**F64, "workload": TOWERS},
    Study.retrieval: {"workload": TOWERS},
    Study.method_memory: {"workload": TOWERS},
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
READS: dict[Study, int] = {
    Study.convergence: 24,
    Study.model_bytes: 4,
    Study.memory_and_time: 12,
    Study.remedies: 87,
    Study.fine_tuning: 87,
    Study.batch_statistics: 496,
    Study.optimizer_states: 199,
    Study.batch_sizes: 26,
    Study.optimizer_memory: 61,
    Study.epoch_tail: 2996,
    Study.update_size: 16,
    Study.clipping_threshold: 55,
    Study.adaptive_windows: 64,
    Study.tensor_norms: 34,
    Study.gradient_noise: 406,
    Study.adam_scale: 25,
    Study.second_moment: 10,
    Study.accumulators: 337,
    Study.randomness: 382,
    Study.loss_scaling: 88,
    Study.learning_curves: 470,
    Study.batch_order: 78,
    Study.critical_batch: 86,
    Study.rescaling: 1998,
    Study.muon: 1834,
    Study.balance_loss: 108,
    Study.negatives: 64,
    Study.retrieval: 134,
    Study.method_memory: 28,
}
TRIALS |= {str(study): {"study": study, **changes} for study, changes in OF_STUDIES.items()}
