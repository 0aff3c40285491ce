"""What a finding of an audit means, and what to change, in the words of the framework whose code called the backward."""

from __future__ import annotations

from collections.abc import Mapping

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.observe.frames import UNINSTALLED
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.judge.cause import MEANINGS, Cause, Meaning

WEIGHED = Meaning(
    fault="",
    sentence="micro-batches count differently than at N=1, in a way that no known cause gives: how often is measured",
    remedy="How often each micro-batch counts is in the message (1 is right). Look at what lies between its loss and the "
    "optimizer: what the loss is multiplied by, the buffer that its gradient is added to, and when that is handed over.",
)
PLACED = Meaning(
    fault="",
    sentence="no known cause reproduces the difference: where it begins is known",
    remedy="The first difference is in the module and operation of the message. Look at what they keep between calls, and at "
    "what they take from the number of samples.",
)
UNSEEN = Meaning(
    fault="",
    sentence="the updates differ, and nothing was seen of the micro-batches",
    remedy="Hand over what each micro-batch adds to the gradient, and the gradient that the optimizer takes, "
    "`hand(contribution=...)` and `hand(gradient=...)`; and call `hand(weights=...)` after every step of the optimizer.",
)


def meaning(finding: Finding) -> Meaning:
    """Say what a finding means: of an unexplained one, by what was weighed, placed or seen.

    Args:
        finding: Of an audit.

    Returns:
        Its sentence and its remedy.
    """
    if finding.is_named:
        return MEANINGS[finding.cause]
    known = (
        (PLACED, finding.evidence.get("module")),
        (WEIGHED, finding.evidence.get("counted")),
        (UNSEEN, finding.evidence.get("backwards") == 0),
    )
    return next((one for one, shown in known if shown), MEANINGS[Cause.unexplained])


SUMMED = "`loss = cross_entropy(logits, labels, reduction='sum') / num_items_in_batch`"
AVERAGES = "the Trainer divides by `accumulate_grad_batches`: `return loss`, the micro-batch's mean"
ADVICE: Mapping[str, Mapping[Cause, str]] = {  # package -> cause -> the lines; each is the right half of an audited script
    "trl": {
        cause: f"the trainer divides no loss that takes `num_items_in_batch`: in a `compute_loss` of your own, {SUMMED}"
        for cause in (Cause.loss_not_divided, Cause.mean_of_means)
    },
    "transformers": {
        Cause.loss_not_divided: "a model that ignores the token count needs `trainer.model_accepts_loss_kwargs = False` before "
        f"`trainer.train()`; in a `compute_loss` of your own, {SUMMED}",
        Cause.mean_of_means: f"take `num_items_in_batch` in a `compute_loss` of your own, and {SUMMED}",
    },
    "lightning": {Cause.loss_not_divided: AVERAGES, Cause.loss_divided_twice: AVERAGES},
    "deepspeed": {
        Cause.loss_divided_twice: "the engine divides by `gradient_accumulation_steps`: `engine.backward(loss)`, of the mean",
    },
    "accelerate": {
        Cause.loss_divided_twice: "`accelerator.backward(loss)` divides by the accumulation steps: leave out the other division",
        Cause.clip_per_micro_batch: "clip behind `if accelerator.sync_gradients:`",
        Cause.schedule_per_micro_batch: "hand over the schedule too: `accelerator.prepare(model, optimizer, loader, scheduler)`",
    },
    "keras": {
        Cause.loss_divided_twice: "an optimizer with `gradient_accumulation_steps` averages: the loss must be a mean, "
        '`reduction="sum_over_batch_size"`',
    },
    "torch": {
        Cause.loss_not_divided: "`loss / gradient_accumulation_steps` is what to differentiate, of micro-batches' mean losses",
        Cause.loss_divided_twice: "`loss / gradient_accumulation_steps` once, and nowhere else",
        Cause.mean_of_means: "a loss with `reduction='sum'`, and `/ num_items_in_batch`, counted over the whole window",
        Cause.clip_per_micro_batch: "`torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)`, or your limit, right before "
        "`optimizer.step()`",
        Cause.schedule_per_micro_batch: "`scheduler.step()` right behind `optimizer.step()`",
        Cause.gradients_cleared_in_window: "`optimizer.zero_grad()` right behind `optimizer.step()`",
        Cause.gradients_not_cleared: "`optimizer.zero_grad()` right behind `optimizer.step()`",
    },
}
SAME = {"pytorch_lightning": "lightning"}


def change(conclusion: Conclusion, finding: Finding) -> str:
    """What to change, and in the words of the package that trains, if something is known for the cause there.

    Args:
        conclusion: What the audit concluded.
        finding: One of its findings.

    Returns:
        One or more sentences.
    """
    return f"{meaning(finding).remedy} {advice(conclusion, finding.cause)}".rstrip()


def advice(conclusion: Conclusion, cause: Cause) -> str:
    """`With PACKAGE: what to write.`, or nothing. A loop is one of torch alone where no other package calls its backward.

    Args:
        conclusion: What the audit concluded.
        cause: What was found.

    Returns:
        A sentence, or an empty text.
    """
    callers = [SAME.get(name, name) for name in conclusion.callers]
    named = [package for package in ADVICE if package in callers and (package != "torch" or callers[1:2] == [UNINSTALLED])]
    known = ADVICE[named[0]].get(cause) if named else None
    return f"With {named[0]}: {known}." if known else ""
