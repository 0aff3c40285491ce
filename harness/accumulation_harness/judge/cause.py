"""The causes: what can be wrong with an accumulated run, in one vocabulary and one order of priority for all that judges.

The diagnoses of trials, of replicas and of audited trainers, the planted faults, the report and `docs/remedies.md` are views of
this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from accumulation_harness.system.enums import StrEnum


class Cause(StrEnum):
    """The machine name of a cause. Where two reproduce a gradient alike (as for N = 2), the first of them is named."""

    samples_repeated = "samples_repeated"
    window_misplaced = "window_misplaced"
    step_every_micro_batch = "step_every_micro_batch"
    loss_not_divided = "loss_not_divided"
    loss_divided_twice = "loss_divided_twice"
    mean_of_means = "mean_of_means"
    short_window_divided_by_n = "short_window_divided_by_n"
    gradients_cleared_in_window = "gradients_cleared_in_window"
    accumulator_overwritten = "accumulator_overwritten"
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
    """What a cause says."""

    fault: str  # its id in the catalogue of faults; empty for `unexplained`
    sentence: str  # what is wrong, as the end of a sentence
    remedy: str  # what to change
    of_the_model: bool = False  # inherent in the model or its loss: no loop can fix it


MEANINGS: dict[Cause, Meaning] = {
    Cause.samples_repeated: Meaning(
        fault="F30",
        sentence="a sample is used twice within a window",
        remedy="A row counts more than once, another never. Check how micro-batches are cut from the window.",
    ),
    Cause.window_misplaced: Meaning(
        fault="F5",
        sentence="the window is dropped, cut short or straddles the end of the epoch",
        remedy="A window is dropped, cut short or goes on over the end of the epoch. Step at the end of the epoch as "
        "well, count micro-batches from the start of each epoch, and give both settings the same rows.",
    ),
    Cause.step_every_micro_batch: Meaning(
        fault="F8",
        sentence="the optimizer steps inside the window",
        remedy="The optimizer steps inside the window (with the optimizer in the backward, too). Step only at the window's end.",
    ),
    Cause.loss_not_divided: Meaning(
        fault="F1",
        sentence="the loss is not divided by the number of micro-batches",
        remedy="The losses of the N micro-batches are added. Divide each by what the whole window holds: with a summed "
        "loss, `loss / W`; with a mean loss over equal micro-batches, `loss / N`. Adam and active clipping hide "
        "the fault from the update: compare gradients.",
    ),
    Cause.loss_divided_twice: Meaning(
        fault="F2",
        sentence="the loss is divided twice by the number of micro-batches",
        remedy="Two layers of code divide: the loop and a framework's `backward`, or a model that was told the "
        "window's token count and a trainer that divides by N as well. Leave one out; with accelerate, multiply "
        "by N before `accelerator.backward`.",
    ),
    Cause.mean_of_means: Meaning(
        fault="F3",
        sentence="means over micro-batches are averaged although their numbers of loss terms differ",
        remedy="Each micro-batch is averaged over its own loss terms, and the means are averaged, although they stand "
        "for unequal numbers of terms (tokens, class weights, a last partial micro-batch). Sum the loss over "
        "each micro-batch and divide by the terms of the window, counted before its first backward.",
    ),
    Cause.short_window_divided_by_n: Meaning(
        fault="F4",
        sentence="a short window is divided by the configured number of micro-batches",
        remedy="The last window of an epoch has fewer micro-batches than N, and is divided by N. Divide by what it "
        "holds (as above), or leave it out at every N.",
    ),
    Cause.gradients_cleared_in_window: Meaning(
        fault="F6",
        sentence="gradients are cleared inside the window: only the last micro-batch counts",
        remedy="`zero_grad` runs before every micro-batch: only the last one counts. Clear once, after the step, and "
        "never between the last backward and the step. A buffer of one's own is fine, if it adds everything up.",
    ),
    Cause.accumulator_overwritten: Meaning(
        fault="F17",
        sentence="only the first micro-batch's gradient is kept",
        remedy="A buffer is assigned where it should be added to.",
    ),
    Cause.gradients_not_cleared: Meaning(
        fault="F7",
        sentence="the gradients of the window before were not cleared",
        remedy="Gradients of earlier windows stay in `.grad`. Call `zero_grad` once per window.",
    ),
    Cause.foreign_gradients: Meaning(
        fault="F31",
        sentence="gradients of something else were there before the first backward",
        remedy="Another optimizer's loss is differentiated through this optimizer's parameters while its window is "
        "open (a generator's loss through the discriminator). Clear this optimizer's gradients before its first "
        "own backward, freeze its parameters for the other loss, or differentiate with `inputs=`.",
    ),
    Cause.clip_before_unscale: Meaning(
        fault="F11",
        sentence="gradients are clipped on the wrong scale, before unscaling or dividing",
        remedy="Gradients are clipped with a factor still in them: the loss scale, or the missing division by N. "
        "Unscale (and divide) first, then clip, then step.",
    ),
    Cause.clip_per_micro_batch: Meaning(
        fault="F10",
        sentence="clipping acts inside the window",
        remedy="Clipping is not linear: clipping each part, or the running sum, is another computation. Clip once, "
        "after the last backward of the window.",
    ),
    Cause.scaler_updated_in_window: Meaning(
        fault="F12",
        sentence="the loss scale changed inside the window",
        remedy="`GradScaler.update` or `unscale_` inside a window mixes gradients of different scales, and so does a "
        "scale of one's own that changes there. Call them once, before and after the step.",
    ),
    Cause.sum_rescaled_in_window: Meaning(
        fault="F33",
        sentence="the sum of gradients so far is scaled again at every micro-batch",
        remedy="The accumulated gradient is divided (or multiplied) between the backwards of a window, so that earlier "
        "micro-batches count less with every further one. Scale each loss instead, or the sum once, before the step; "
        "with `torch.distributed.pipelining` and several schedule calls per step, pass `scale_grads=False`.",
    ),
    Cause.low_precision_accumulator: Meaning(
        fault="F18",
        sentence="the running sum is rounded to a narrow format",
        remedy="Sums in 16 bits lose what is small beside the sum. Keep the accumulator in float32.",
    ),
    Cause.underflow_from_division: Meaning(
        fault="F19",
        sentence="the divided loss underflows in float16, so gradient entries vanish",
        remedy="In float16 the gradients of one micro-batch, N times smaller than the sum, fall below the smallest "
        "number. Scale the loss (`GradScaler`), accumulate in float32, or use bfloat16.",
    ),
    Cause.weight_decay_per_micro_batch: Meaning(
        fault="F21",
        sentence="the weight decay is in the gradient once for every micro-batch",
        remedy="Decay belongs into the optimizer step: use its `weight_decay`.",
    ),
    Cause.optimizer_state_per_micro_batch: Meaning(
        fault="F22",
        sentence="the optimizer state advances with the micro-batches",
        remedy="Moments, bias correction or step counters advance with the micro-batches. Touch them only in the step.",
    ),
    Cause.ema_per_micro_batch: Meaning(
        fault="F23",
        sentence="the average of the weights is updated with every micro-batch",
        remedy="Update the average once per optimizer step, after it; target networks as well.",
    ),
    Cause.schedule_per_micro_batch: Meaning(
        fault="F9",
        sentence="the learning-rate schedule follows the number of micro-batches",
        remedy="The learning rate follows the number of micro-batches. Advance the schedule once per optimizer step, "
        "and give it the number of optimizer steps as its length.",
    ),
    Cause.auxiliary_loss_scale: Meaning(
        fault="F24",
        sentence="the penalty is not weighted as the loss is",
        remedy="A penalty that does not depend on the rows is added in full to every micro-batch. Add it once per "
        "window, or divide it by the number of micro-batches.",
    ),
    Cause.cached_weights_stale: Meaning(
        fault="F26",
        sentence="the forward used the weights of an earlier window",
        remedy="A forward uses weights of before the last optimizer step: a rounded or quantised copy that is not "
        "renewed at the first micro-batch of each window. Renew it after every step.",
    ),
    Cause.resume_in_window: Meaning(
        fault="F28",
        sentence="the first micro-batches of a window were lost",
        remedy="The run was stopped and resumed inside a window: the gradients so far are lost. Save after an "
        "optimizer step, or save `.grad` too, and start again at the first row of a window.",
    ),
    Cause.replica_scale: Meaning(
        fault="F15",
        sentence="mean and sum over replicas are confused",
        remedy="Mean and sum over replicas are mixed up. DDP and FSDP average gradients over ranks: divide by the "
        "rank's share of the window, or by the global number of terms and multiply by the number of ranks; with "
        "unequal tokens per rank, always the latter.",
    ),
    Cause.replicas_not_synchronised: Meaning(
        fault="F16",
        sentence="replicas step on gradients that were not exchanged",
        remedy="`no_sync` covers the last micro-batch too (or a wrapper is called past its `forward`). Only the micro-"
        "batches before the last belong in it.",
    ),
    Cause.non_finite_micro_batch: Meaning(
        fault="F27",
        sentence="a non-finite micro-batch is left out, and the window goes on without it",
        remedy="A micro-batch with NaN is left out and the rest of the window goes on, re-weighted. Leave out the whole window.",
    ),
    Cause.batch_statistics: Meaning(
        fault="F13",
        sentence="BatchNorm normalises by the micro-batch's statistics, as Ghost BatchNorm in the full batch does",
        remedy="BatchNorm normalises by the micro-batch: no way of accumulating changes that, short of a second forward pass "
        "over the window. Use GroupNorm or LayerNorm, freeze the statistics, or normalise fixed chunks of the "
        "micro-batch's size at every N (Ghost BatchNorm), so that N changes nothing. The same holds for layers of one's own.",
        of_the_model=True,
    ),
    Cause.stateful_forward: Meaning(
        fault="F34",
        sentence="a forward changes state that the next forward uses, N times in a window instead of once",
        remedy="A training forward moves a buffer that the next one reads: the power iteration of spectral_norm, a codebook that "
        "follows its inputs. Let it move once per window: after the first micro-batch put the module that owns the buffer "
        "(`layer.parametrizations` of spectral_norm) into evaluation mode, and back after the step. A recurrent state is kept "
        "by row, or forgotten after every micro-batch.",
        of_the_model=True,
    ),
    Cause.stochastic_layers: Meaning(
        fault="F14",
        sentence="random draws inside the model depend on how the window is split",
        remedy="Dropout, augmentation and noise added to gradients draw per call; another split gives other draws, "
        "equal in law. Nothing is wrong unless runs must be comparable number by number: then draw per sample.",
        of_the_model=True,
    ),
    Cause.non_separable_loss: Meaning(
        fault="F25",
        sentence="a sample's loss hangs on the others it is computed with, and a micro-batch has fewer",
        remedy="The loss of a row depends on the other rows of its batch (in-batch negatives, ratios): the sum over "
        "micro-batches is another loss. Compute representations of the whole window first, then pass their "
        "gradients back in parts.",
        of_the_model=True,
    ),
    Cause.normaliser_depends_on_split: Meaning(
        fault="F32",
        sentence="what the loss takes from the window (a mean, a deviation) is taken from the micro-batch",
        remedy="The weight of a row depends on which rows share its micro-batch (advantages or ratios normalised over "
        "the micro-batch). Compute the statistics over the whole window before it is cut.",
    ),
    Cause.memory_bank: Meaning(
        fault="F35",
        sentence="by design, negatives come from a bank of past representations as well",
        remedy="Rows are compared with representations of earlier micro-batches, which carry no gradient (ContAccum, MoCo): this "
        "is another loss than any batch's, chosen on purpose, and no fault. Where the large batch is wanted, compute "
        "representations of the whole window first, then pass their gradients back in parts.",
    ),
    Cause.counter_wrong: Meaning(
        fault="F29",
        sentence="steps, samples or loss terms are miscounted",
        remedy="Steps, samples or tokens are counted otherwise than at N=1, or the gradient is divided by another "
        "number of loss terms than in the reference (padding counted as tokens, for example). Count where the "
        "loss is taken, on what it is taken over.",
    ),
    Cause.loss_report_differs: Meaning(
        fault="F20",
        sentence="the reported loss is not the loss that was differentiated",
        remedy="The gradients are right, the reported loss is not: report the sum of what was differentiated over the window.",
    ),
    Cause.unexplained: Meaning(
        fault="",
        sentence="the computations differ, and no known cause reproduces how",
        remedy="The evidence shows that the computations differ and no known cause reproduces how. Where a module and a "
        "line are told, the first difference is there: look at what they keep between calls, and at what they take "
        "from the number of rows. Otherwise pass `dtype` and `order_seed` through, compare with an independent "
        "`reference`, try SGD without clipping, and switch layers off one by one. Where to start: the residual in the "
        "evidence. At the floor, the micro-batches are weighted wrongly; above it, their computations differ.",
    ),
}

INHERENT = frozenset(cause for cause, meaning in MEANINGS.items() if meaning.of_the_model)
ON_RANKS = (Cause.replica_scale, Cause.replicas_not_synchronised)  # they take several processes
PRIORITY = {cause: place for place, cause in enumerate(Cause)}

Causes = tuple[Cause, ...]  # of one arm; empty: nothing is wrong
JOINT = "+"  # between them in tables


def joined(causes: Causes) -> str:
    """The causes as one field of a table: `batch_statistics+loss_not_divided`; empty without any."""
    return JOINT.join(causes)


def parsed(text: str) -> Causes:
    """The causes of a field written by `joined`. Raises ValueError for a name that is no cause."""
    return tuple(Cause(name) for name in text.split(JOINT)) if text else ()
