"""The causes: what can be wrong with an accumulated run, in one vocabulary and one order of priority for all that judges.

The diagnoses of trials, of replicas and of audited trainers, the planted faults, the report and `docs/remedies.md` are views of
this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from accumulation_harness.system.enums import StrEnum


class Cause(StrEnum):
    """The machine name of a cause.

    The order is that of priority: if two causes reproduce a gradient equally well (as can happen for N = 2), the first is
    named.
    """

    samples_repeated = "samples_repeated"
    window_misplaced = "window_misplaced"
    step_every_micro_batch = "step_every_micro_batch"
    loss_not_divided = "loss_not_divided"
    loss_divided_twice = "loss_divided_twice"
    mean_of_means = "mean_of_means"
    short_window_divided_by_n = "short_window_divided_by_n"
    gradients_cleared_in_window = "gradients_cleared_in_window"
    micro_batches_lost = "micro_batches_lost"
    gradients_not_cleared = "gradients_not_cleared"
    foreign_gradients = "foreign_gradients"
    clip_before_unscale = "clip_before_unscale"
    clip_per_micro_batch = "clip_per_micro_batch"
    scaler_updated_in_window = "scaler_updated_in_window"
    sum_rescaled_in_window = "sum_rescaled_in_window"
    low_precision_accumulator = "low_precision_accumulator"
    underflow_from_division = "underflow_from_division"
    weight_decay_per_micro_batch = "weight_decay_per_micro_batch"
    optimizer_state_per_micro_batch = "optimizer_state_per_micro_batch"
    ema_per_micro_batch = "ema_per_micro_batch"
    schedule_per_micro_batch = "schedule_per_micro_batch"
    auxiliary_loss_scale = "auxiliary_loss_scale"
    cached_weights_stale = "cached_weights_stale"
    resume_in_window = "resume_in_window"
    replica_scale = "replica_scale"
    replicas_not_synchronised = "replicas_not_synchronised"
    non_finite_micro_batch = "non_finite_micro_batch"
    batch_statistics = "batch_statistics"
    stateful_forward = "stateful_forward"
    stochastic_layers = "stochastic_layers"
    non_separable_loss = "non_separable_loss"
    normaliser_depends_on_split = "normaliser_depends_on_split"
    memory_bank = "memory_bank"
    counter_wrong = "counter_wrong"
    loss_report_differs = "loss_report_differs"
    unexplained = "unexplained"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a cause means, and what to change."""

    fault: str  # its id in the catalogue of faults; empty for `unexplained`
    sentence: str  # what is wrong, as the end of a sentence
    remedy: str  # what to change
    of_the_model: bool = False  # inherent in the model or its loss: no loop can fix it


MEANINGS: dict[Cause, Meaning] = {
    Cause.samples_repeated: Meaning(
        fault="F30",
        sentence="a sample is used twice within a window",
        remedy="A sample counts more than once. Check how windows are cut; add each micro-batch once.",
    ),
    Cause.window_misplaced: Meaning(
        fault="F5",
        sentence="a window is dropped, cut short, or straddles the end of the epoch",
        remedy="A window is dropped, cut short, or continues into the next epoch. Step at the end of the epoch as well, "
        "count micro-batches from the start of each epoch, and use the same samples at every N.",
    ),
    Cause.step_every_micro_batch: Meaning(
        fault="F8",
        sentence="the optimizer steps inside the window",
        remedy="The optimizer steps inside the window, possibly from a hook of the backward pass. Step only at the end of "
        "the window.",
    ),
    Cause.loss_not_divided: Meaning(
        fault="F1",
        sentence="the loss is not divided by the number of micro-batches",
        remedy="The losses of the N micro-batches are added. Divide each by what the whole window holds: with a summed loss, "
        "`loss / W`; with a mean loss over equal micro-batches, `loss / N`. With Adam, or where clipping takes "
        "effect, the update does not show the fault; the gradients do.",
    ),
    Cause.loss_divided_twice: Meaning(
        fault="F2",
        sentence="the loss is divided twice by the number of micro-batches",
        remedy="Two layers of code divide the loss: the loop and a framework's `backward`, or a model that receives the "
        "window's token count and a trainer that divides by N as well. Remove one of the divisions, or undo accelerate's: "
        "multiply by N before `accelerator.backward`.",
    ),
    Cause.mean_of_means: Meaning(
        fault="F3",
        sentence="means over micro-batches are averaged although their numbers of loss terms differ",
        remedy="Each micro-batch is averaged over its own loss terms, and the means are averaged, although they stand for "
        "unequal numbers of terms (tokens, class weights, a last partial micro-batch). Collect the window's micro-batches "
        "first, count their terms, and divide each summed loss by that count.",
    ),
    Cause.short_window_divided_by_n: Meaning(
        fault="F4",
        sentence="a short window is divided by the configured number of micro-batches",
        remedy="The last window of an epoch has fewer than N micro-batches but is divided by N. Divide by the number that it "
        "has, or leave its rows out, at N=1 as well.",
    ),
    Cause.gradients_cleared_in_window: Meaning(
        fault="F6",
        sentence="gradients are cleared inside the window, so that only what came after counts",
        remedy="`zero_grad` runs before every micro-batch, so only the last one counts. Clear once per window, after the "
        "step and never between the last backward and the step. A gradient buffer of your own is fine if it adds up "
        "every micro-batch.",
    ),
    Cause.micro_batches_lost: Meaning(
        fault="F17",
        sentence="some micro-batches of a window never reach the step",
        remedy="A buffer is assigned where it should be added to: some micro-batches are lost. Add every micro-batch's gradient "
        "to it, and clear it after the step.",
    ),
    Cause.gradients_not_cleared: Meaning(
        fault="F7",
        sentence="the gradients of the previous window were not cleared",
        remedy="Gradients of earlier windows stay in `.grad`. Call `zero_grad` once per window. If an epoch ends with an "
        "incomplete window, step on its gradients or clear them.",
    ),
    Cause.foreign_gradients: Meaning(
        fault="F31",
        sentence="gradients of another loss were there before the first backward",
        remedy="Another optimizer's loss is differentiated through this optimizer's parameters while the window of this one "
        "is open (a generator's loss through the discriminator). Clear this optimizer's gradients before the first "
        "backward of its own loss, freeze its parameters for the other loss, or differentiate with `inputs=`.",
    ),
    Cause.clip_before_unscale: Meaning(
        fault="F11",
        sentence="gradients are clipped on the wrong scale, before unscaling or dividing",
        remedy="Gradients are clipped while a factor is still in them: the loss scale, or N, by which they are divided "
        "later. Unscale (and divide) first, then clip, then step.",
    ),
    Cause.clip_per_micro_batch: Meaning(
        fault="F10",
        sentence="clipping acts inside the window",
        remedy="Clipping is not linear: clipping each micro-batch's gradient, or the running sum, gives another gradient "
        "than clipping the window's. Clip once, after the last backward of the window.",
    ),
    Cause.scaler_updated_in_window: Meaning(
        fault="F12",
        sentence="the loss scale changed inside the window",
        remedy="`GradScaler.update` or `unscale_` inside a window mixes gradients of different scales, and so does a loss "
        "scale of your own that changes there. Call `unscale_` once, before the step, and `update` once, after it.",
    ),
    Cause.sum_rescaled_in_window: Meaning(
        fault="F33",
        sentence="the accumulated gradient is rescaled at every micro-batch",
        remedy="The accumulated gradient is divided (or multiplied) between the backward passes of a window, so that earlier "
        "micro-batches count less. Scale each loss instead, or scale the sum once, before the step; with "
        "`torch.distributed.pipelining` and several calls of the pipeline's schedule per step, pass it "
        "`scale_grads=False`.",
    ),
    Cause.low_precision_accumulator: Meaning(
        fault="F18",
        sentence="the running sum is rounded to a narrow format",
        remedy="A running sum in 16 bits loses small contributions. Keep the accumulator in float32.",
    ),
    Cause.underflow_from_division: Meaning(
        fault="F19",
        sentence="the divided loss underflows in float16, so gradient entries vanish",
        remedy="In float16 the gradients of one micro-batch are N times smaller than those of the window, and small ones are "
        "rounded to zero. Scale the loss (`GradScaler`), accumulate in float32, or use bfloat16.",
    ),
    Cause.weight_decay_per_micro_batch: Meaning(
        fault="F21",
        sentence="weight decay is added to the gradient at every micro-batch",
        remedy="Weight decay is applied at every micro-batch. Use the optimizer's `weight_decay`, or decay once per window.",
    ),
    Cause.optimizer_state_per_micro_batch: Meaning(
        fault="F22",
        sentence="the optimizer state advances with the micro-batches",
        remedy="Moments, bias corrections or step counters advance with the micro-batches. Change them only in the optimizer "
        "step.",
    ),
    Cause.ema_per_micro_batch: Meaning(
        fault="F23",
        sentence="the average of the weights is updated with every micro-batch",
        remedy="The average of the weights is updated at every micro-batch. Update it once per optimizer step, after the "
        "step; the same holds for target networks.",
    ),
    Cause.schedule_per_micro_batch: Meaning(
        fault="F9",
        sentence="the learning-rate schedule follows the number of micro-batches",
        remedy="The rate follows the number of micro-batches. Advance the schedule once per optimizer step, and lay it out for "
        "these; scale the rate by the whole batch.",
    ),
    Cause.auxiliary_loss_scale: Meaning(
        fault="F24",
        sentence="the penalty is not weighted as the loss is",
        remedy="A penalty that does not depend on the samples is added in full to every micro-batch's loss. Add it once per "
        "window, or divide it by the number of micro-batches.",
    ),
    Cause.cached_weights_stale: Meaning(
        fault="F26",
        sentence="the forward used the weights of an earlier window",
        remedy="A forward pass uses weights from before the last optimizer step: a rounded or quantised copy that is not "
        "renewed at the first micro-batch of each window. Renew the copy after every step.",
    ),
    Cause.resume_in_window: Meaning(
        fault="F28",
        sentence="the first micro-batches of a window were lost",
        remedy="The run was resumed inside a window, or cleared gradients there once: those so far were lost. Save after an "
        "optimizer step; or save `.grad` too, and go on with the next micro-batch; or begin the window again.",
    ),
    Cause.replica_scale: Meaning(
        fault="F15",
        sentence="mean and sum over replicas are confused",
        remedy="Mean and sum over replicas are confused. DDP and FSDP average gradients over ranks. Divide the summed loss "
        "by the number of terms on all ranks, and multiply it by the number of ranks; with equally many terms on "
        "every rank that is to divide by the number that one rank has in the window.",
    ),
    Cause.replicas_not_synchronised: Meaning(
        fault="F16",
        sentence="replicas step on gradients that were not exchanged",
        remedy="`no_sync` covers the last micro-batch too, or the model is called through `wrapper.module`, so that the "
        "wrapper's `forward` does not run. Only the micro-batches before the last belong inside `no_sync`.",
    ),
    Cause.non_finite_micro_batch: Meaning(
        fault="F27",
        sentence="a non-finite micro-batch is left out, and the window goes on without it",
        remedy="A micro-batch with NaN is skipped, so that the others make up the window. Skip the whole window instead.",
    ),
    Cause.batch_statistics: Meaning(
        fault="F13",
        sentence="BatchNorm, or another layer, computes with statistics of the micro-batch",
        remedy="BatchNorm normalises by the micro-batch: no way of accumulating changes that, except two passes over the "
        "window, the first of which takes the statistics. Use GroupNorm or LayerNorm, freeze the statistics, or "
        "normalise chunks of one fixed size at every N (Ghost BatchNorm), so that N changes nothing. The same holds "
        "for layers of your own that use statistics of the batch.",
        of_the_model=True,
    ),
    Cause.stateful_forward: Meaning(
        fault="F34",
        sentence="a forward changes state that the next forward uses, N times in a window instead of once",
        remedy="A training forward changes a buffer that the next one reads: the power iteration of spectral_norm, a "
        "codebook that follows its inputs. Let it change once per window: after the first micro-batch put the module "
        "that owns the buffer (`layer.parametrizations` of spectral_norm) into evaluation mode, and back after the "
        "step. Keep a recurrent state per sample, or reset it after every micro-batch.",
        of_the_model=True,
    ),
    Cause.stochastic_layers: Meaning(
        fault="F14",
        sentence="random draws inside the model depend on how the window is split",
        remedy="Dropout, augmentation and noise added to gradients draw random numbers per call, so another split gives other "
        "numbers with the same distribution. Nothing is wrong, unless runs have to give the same numbers: then draw the "
        "random numbers per sample.",
        of_the_model=True,
    ),
    Cause.non_separable_loss: Meaning(
        fault="F25",
        sentence="a sample's loss depends on the other samples of its batch, and a micro-batch has fewer",
        remedy="The loss of a sample depends on the other samples of its batch (in-batch negatives, ratios of sums), so the sum "
        "over micro-batches is another loss. Compute the representations of the whole window first, then pass their "
        "gradients back in parts.",
        of_the_model=True,
    ),
    Cause.normaliser_depends_on_split: Meaning(
        fault="F32",
        sentence="a mean or deviation that the loss needs of the window is taken over the micro-batch",
        remedy="The weight of a sample depends on which samples share its micro-batch (advantages or ratios normalised over "
        "the micro-batch). Compute the statistics over the whole window before it is cut.",
    ),
    Cause.memory_bank: Meaning(
        fault="F35",
        sentence="by design, negatives also come from a bank of past representations",
        remedy="Samples are compared with representations of earlier micro-batches, which carry no gradient (ContAccum, "
        "MoCo). No single batch gives this loss; it is chosen on purpose and is no fault. If the large batch is "
        "wanted, compute the representations of the whole window first, then pass their gradients back in parts.",
    ),
    Cause.counter_wrong: Meaning(
        fault="F29",
        sentence="steps, samples or loss terms are miscounted",
        remedy="Steps, samples or tokens are counted differently than at N=1, or the gradient is divided by a different "
        "number of loss terms than there (padding counted as tokens, for example). Count where the loss is "
        "computed, over the terms that it is computed from.",
    ),
    Cause.loss_report_differs: Meaning(
        fault="F20",
        sentence="the reported loss is not the loss that was differentiated",
        remedy="The gradients are right, but the reported loss is not. Report the sum of the losses on which `backward` was "
        "called in the window.",
    ),
    Cause.unexplained: Meaning(
        fault="",
        sentence="the computations differ, and no known cause reproduces the difference",
        remedy="The two computations differ, and no known cause reproduces the difference. If a module and a line are named, "
        "the first difference is there: look at the state that the module keeps between calls, and at where it uses "
        "the number of samples. Otherwise let the function take `dtype` and `order_seed` (see docs/audit.md), compare with "
        "an independent `reference`, try SGD without clipping, and switch layers off one by one. The residual in the evidence is "
        "what no choice of weights for the micro-batches can explain: if it is only rounding, their weights are "
        "wrong; if it is more, their gradients are.",
    ),
}

INHERENT = frozenset(cause for cause, meaning in MEANINGS.items() if meaning.of_the_model)
ON_RANKS = (Cause.replica_scale, Cause.replicas_not_synchronised)  # they take several processes
PRIORITY = {cause: place for place, cause in enumerate(Cause)}

Causes = tuple[Cause, ...]  # of one arm; empty: nothing is wrong
JOINT = "+"  # between them in tables


def joined(causes: Causes) -> str:
    """Write causes as one field of a table.

    Args:
        causes: The causes of one arm.

    Returns:
        Their names, as `batch_statistics+loss_not_divided`; empty without any.
    """
    return JOINT.join(causes)


def parsed(text: str) -> Causes:
    """Read the causes from a field that `joined` has written.

    Args:
        text: The field.

    Returns:
        The causes.

    Raises:
        ValueError: A name is not that of a cause.
    """
    return tuple(Cause(name) for name in text.split(JOINT)) if text else ()
