"""What to write in place of a fault, in the words of the framework that the code is written with."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from accumulation_harness.audit.report.subject import Subject
from accumulation_harness.judge.cause import Cause

PLAIN = "compute the loss as `loss = cross_entropy(logits, labels, reduction='sum') / num_items_in_batch`"
ADVICE: Mapping[str, Mapping[Cause, str]] = {  # package -> cause -> the lines; each is the right half of an audited script
    "lightning": {
        Cause.loss_not_divided: "the Trainer divides by `accumulate_grad_batches`: `return loss`, the micro-batch's mean",
        Cause.loss_divided_twice: "the Trainer divides by `accumulate_grad_batches`: `return loss`, the micro-batch's mean",
    },
    "transformers": {
        Cause.loss_not_divided: "a model that ignores the token count needs `trainer.model_accepts_loss_kwargs = False` before "
        f"`trainer.train()`; in a `compute_loss` of your own, {PLAIN}",
        Cause.mean_of_means: f"take `num_items_in_batch` in a `compute_loss` of your own, and {PLAIN}",
    },
    "accelerate": {
        Cause.loss_divided_twice: "`accelerator.backward(loss)` divides by the accumulation steps: leave out the other division",
        Cause.clip_per_micro_batch: "clip behind `if accelerator.sync_gradients:`",
        Cause.schedule_per_micro_batch: "hand over the schedule too: `accelerator.prepare(model, optimizer, loader, scheduler)`",
    },
}


def advice(subject: Subject | None, cause: Cause) -> str:
    """`With PACKAGE: what to write.`; empty where nothing is known for the cause in what the file imports."""
    if subject is None:
        return ""
    nodes = [node for node in ast.walk(subject.train.tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0].replace("pytorch_lightning", "lightning") for name in names}
    return next(
        (f"With {package}: {known[cause]}." for package, known in ADVICE.items() if package in imported and cause in known), ""
    )
