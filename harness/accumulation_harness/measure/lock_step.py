"""Arms trained side by side on the same windows, and what is seen of them.

Measuring leaves no trace: gradients are read in the optimizer's own hook, parameters are copied, generators are put back.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typing_extensions import Self, Unpack

from accumulation_harness.config import ConfigError, LastWindow, OptimizerConfig, Precision, ScheduleConfig, TrialConfig, to_dict
from accumulation_harness.config.arm_name import FULL, ArmName
from accumulation_harness.judge.counters import Counter, Counts, Differences, differing, same
from accumulation_harness.measure.environment import name_of, vectors
from accumulation_harness.measure.examination import examine, try_step, why_not_float64
from accumulation_harness.measure.offload import Offload, choose_offload
from accumulation_harness.measure.optimizer_state import (
    learning_rates,
    optimizer_state,
    state_steps,
    state_tensors,
    step_in_float32,
)
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.determinism import (
    RandomState,
    fixed_randomness,
    kept_randomness,
    random_state,
    start_randomness,
)
from accumulation_harness.recipes.execution import check_available, exchange_forward
from accumulation_harness.recipes.hand_written import NO_SAMPLE
from accumulation_harness.recipes.micro_batch import hash_seed, windows
from accumulation_harness.recipes.recipe import Arm, Recipe, make_optimizer, make_schedule, take_step
from accumulation_harness.referee.gradients import (
    Elements,
    comparison,
    distances_to,
    flatten,
    gradients,
    group_names,
    moments_of,
    relative_distance,
)
from accumulation_harness.referee.oracle import Referee
from accumulation_harness.system import pytree
from accumulation_harness.system.state import Snapshot, in_place, snapshot, transforming
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.custom import CustomWorkload
from accumulation_harness.workloads.fixed_randomness import has_draws
from accumulation_harness.workloads.layers import copied, draws, has_batch_norm, in_format, of_two_modes, without_dropout

REFERENCE = str(ArmName(FULL))
LARGE = 4 * 2**20  # bytes of a model's parameters, in float32
ExactGradient = Callable[[str], Tensor | None]  # label of an arm -> [P] float64 at its present parameters
Around = Callable[[str], AbstractContextManager[None]]  # label of an arm -> entered before its window, and left after it
Gradients = Literal["kept", "alone", "compared"]  # what becomes of the gradients that the optimizers consume


class ArmChanges(TypedDict, total=False):
    """Settings of the trial that an arm may have otherwise; what is absent is as the trial configures it."""

    precision: Precision
    steps: int  # of the learning-rate schedule
    clip_norm: float | None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema_decay: float | None


class Setting:
    """What all arms of a trial share: the data in float64 and in the trial's format, the device, and the initial weights."""

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.not_float64 = ""  # why a task of the user's own does not compute in float64, where it does not
        check_available(config.execution, device)
        self.workloads: dict[torch.dtype, Workload] = {
            dtype: make_workload(config, device=device, dtype=dtype)
            for dtype in {torch.float64, precision.parameter_dtype(config.precision)}
        }
        with fixed_randomness(config.seed, torch.device("cpu")):
            self.initial = self.exact.make_model().train()
        self.num_parameters = sum(p.numel() for p in self.initial.parameters())
        self.offload = choose_offload(config, self.initial, device)
        self.has_batch_norm = has_batch_norm(self.initial)
        self.narrow_steps = try_step(
            config.optimizer, self.initial
        )  # why its optimizer takes no step in float64; empty if it does
        if isinstance(self.exact, CustomWorkload):
            ids = next(self.windows(1))
            self.not_float64 = why_not_float64(self.exact, self.initial, ids, device)
        narrow = self.not_float64 or self.narrow_steps
        if narrow and config.precision == Precision.float64:
            expected = f"float32 or a 16-bit format: the task does not compute in float64 ({narrow})"
            raise ConfigError("precision", config.precision, expected)
        if isinstance(self.exact, CustomWorkload):
            micro_batch = max(1, config.effective_batch // max(config.accumulation_steps))
            examine(self.exact, self.initial, ids, device, self.exact_dtype, micro_batch=micro_batch)
        self.offload.settle(self.initial.parameters())
        self.draws = draws(self.initial)  # random numbers, in a training forward
        # A GPU draws as many numbers at once as fit into 16 bytes, so that dropout's masks depend on the format there, as normal
        # and uniform numbers do everywhere.
        same = device.type == "cpu" and not has_draws(self.initial)
        self.masks_are_shared = not self.draws or same or config.precision == Precision.float64

    def under(self, config: TrialConfig) -> Self:
        """The same data, model and weights under another configuration, which has other windows, recipes or probes."""
        other = copy.copy(self)
        other.config = config
        return other

    @cached_property
    def is_large(self) -> bool:
        """Whether it takes longer to compute with the model than to look after it."""
        return 4 * self.num_parameters >= LARGE

    @property
    def exact_dtype(self) -> torch.dtype:
        """The format of exact gradients: float64, or float32 of a task that has no other."""
        return torch.float32 if self.not_float64 else torch.float64

    @property
    def exact(self) -> Workload:
        """The workload in `exact_dtype`."""
        return self.workloads[self.exact_dtype]

    def windows(self, num: int | None = None, *, size: int | None = None, last: LastWindow | None = None) -> Iterator[Tensor]:
        """Draw the trial's windows.

        Args:
            num: How many, from the first one on; `config.steps` unless given.
            size: Samples in each; `config.effective_batch` unless given.
            last: What becomes of an epoch's remainder; `config.data.last_window` unless given.

        Returns:
            Sample ids, [n] int64 for each window.
        """
        config = self.config
        size, last = size or config.effective_batch, last or config.data.last_window
        return islice(windows(self.exact.num_samples, size, config.seed, last), config.steps if num is None else num)

    def randomness(self, *stream: int) -> AbstractContextManager[None]:
        """Draws from torch's generators start from the trial's seed and `stream` (in a training, the optimizer step)."""
        return fixed_randomness(hash_seed(self.config.seed, *stream) if stream else self.config.seed, self.device)

    def generator(self, *stream: int) -> torch.Generator:
        """A generator on the CPU that starts from the trial's seed and `stream`."""
        return torch.Generator().manual_seed(hash_seed(self.config.seed, *stream))

    def referee(self, *, dropout: bool = True) -> Referee:
        """The referee of the trial's model and loss, in `exact_dtype`; without `dropout` its layers of that kind do nothing."""
        model = self._model(self.exact_dtype, dropout)
        self.offload.settle(model.parameters())
        return Referee(self.exact, model, keep=self.offload.put)

    def identity(self, settings: Sequence[str], windows: Sequence[Tensor], **more: Any) -> dict[str, Any]:
        """What a measurement on `windows` depends on: these settings, the machine, the very weights and samples, and `more`."""
        plain, samples = to_dict(self.config), pytree.tensors([self.exact.batch(ids).inputs for ids in windows])
        values = [self._initial_digest, digest_of([*samples, *windows])]
        machine = [torch.__version__, vectors(), torch.get_num_threads(), name_of(self.device)]
        return {"settings": {name: plain[name] for name in settings}, "machine": machine, "values": values, **more}

    @cached_property
    def _initial_digest(self) -> str:
        return digest_of([*self.initial.parameters(), *self.initial.buffers()])

    def arms(
        self, recipes: Mapping[str, Recipe], *, dropout: bool = True, scaler: bool = True, **changes: Unpack[ArmChanges]
    ) -> dict[str, Arm]:
        """A fresh arm for each recipe, by its label: see `arm`."""
        if self.device.type != "cpu" or self.is_large:
            gc.collect()  # arms of an earlier phase are cycles, and hold memory
        made = {}
        for label, recipe in recipes.items():
            made[label] = self.arm(recipe, dropout=dropout, scaler=scaler, **changes)
            self.offload.settle(tensors_of(made[label]))
        return made

    def arm(self, recipe: Recipe, *, dropout: bool = True, scaler: bool = True, **changes: Unpack[ArmChanges]) -> Arm:
        """A fresh arm at the initial weights, as the trial configures it but for `changes`; `dropout` and `scaler` can be off."""
        config = dataclasses.replace(self.config, **changes)
        dtype = precision.parameter_dtype(config.precision)
        model = self._model(dtype, dropout)
        optimizer = make_optimizer(config.optimizer, model.parameters())
        if self.narrow_steps and dtype == torch.float64:
            step_in_float32(optimizer)
        ema = None if config.ema_decay is None else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))
        scale = config.loss_scale
        if config.precision == self.config.precision:
            exchange_forward(model, recipe.execution)
        else:
            scale = precision.power_of_two(scale)
        return Arm(
            recipe=recipe,
            workload=self.workloads[dtype],
            model=model,
            optimizer=optimizer,
            schedule=make_schedule(config.schedule, optimizer, config.steps),
            scaler=precision.make_scaler(self.config.precision if scaler else config.precision, self.device, scale),
            precision=config.precision,
            device=self.device,
            clip_norm=config.clip_norm,
            ema=ema,
        )

    def _model(self, dtype: torch.dtype, dropout: bool) -> nn.Module:
        model = in_format(copied(self.initial), self.device, dtype)
        return model if dropout else without_dropout(model)


@dataclass(frozen=True)
class Taken:
    """How an optimizer step was taken, beside the gradient that it consumed."""

    rates: tuple[float, ...]  # learning rates of the parameter groups
    idle: tuple[bool, ...]  # of each parameter: whether it had no gradient
    randomness: RandomState | None = None  # from which it drew, if it drew; where forwards are watched


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Hex digits of the SHA-256 of their formats, shapes and bytes.

    Args:
        tensors: Tensors in a fixed order.

    Returns:
        64 hex digits.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_of(arm: Arm) -> Iterator[Tensor]:
    """List what an arm carries from step to step, found as it is asked for.

    Nothing is asked for where nothing is offloaded: it would be 2 % of a small model's training.

    Args:
        arm: The arm.

    Yields:
        Weights, buffers, the optimizer's state and the moving average.
    """
    for owner in (arm.model, arm.ema):
        if owner is not None:
            yield from owner.parameters()
            yield from owner.buffers()
    yield from state_tensors(arm.optimizer)


@dataclass(frozen=True)
class Forward:
    """Where torch's generators stood when a forward began, and whether it drew from them."""

    began_at: RandomState
    draws: bool


class Watch:
    """Records the gradient that an arm's optimizer receives at each step, and the weights at each forward."""

    def __init__(self, arm: Arm, *, compares: bool = True, looks: bool = True, draws: bool = False) -> None:
        self.compares = compares  # whether anything but its steps is wanted
        self.keeps = True  # whether `gradient` is wanted of this window
        self.gradient: Tensor | None = None  # [P] float64, of the last optimizer step; None when the scaler skipped it
        self.reference: Elements | None = None  # a gradient that each step's is compared with at once
        self.moments: Tensor | None = None  # [2] of the last optimizer step and the reference
        self.consumed: Elements | None = None  # of the last optimizer step, where there is no reference
        self.began: Tensor | None = None  # [P] float64, the weights at the window's start, where forwards are watched
        self.last_forward: Tensor | None = None  # [P] float64, those of the window's last forward, where they are others
        self.left_over: Tensor | None = None  # [P] float64, gradients there before the window's first backward, if any
        self.written: Tensor | None = None  # [P] float64, gradients that the last step has left otherwise than it found them
        self.taken: Taken | None = None  # the last optimizer step
        self._idle: Taken | None = None  # the window's last step without any gradient
        self.steps = self.steps_in_window = 0
        self.forwards: dict[int, Forward] = {}  # of the window, that a backward went through; where draws are looked at
        self.rows_by_draws: dict[str, Tensor] = {}  # digest of where the generators stood -> ids of the rows that drew from there
        self.drawn_again = 0  # micro-batches that drew what other rows had drawn
        self.evaluated = 0  # windows with a forward in which a layer of two modes was in that of evaluation
        self._modes = of_two_modes(arm.model)
        self.steps_before_last_forward = 0  # of the window, where forwards are watched
        self.loss = torch.zeros(())  # of the last window
        self._backward_begun = False
        self.parameters = list(arm.model.parameters())
        self.missed = [0] * len(self.parameters)  # steps at which each had no gradient
        self._optimizer, self._inside = arm.optimizer, 0
        self._versions: list[int | None] = []
        first, hooks = arm.optimizer.register_step_pre_hook(self._see_step), arm.optimizer._optimizer_step_pre_hooks
        cast("OrderedDict[int, Any]", hooks).move_to_end(first.id, last=False)  # hooks of its own are part of its step
        arm.optimizer.register_step_post_hook(self._leave_step)
        if compares and (looks or self._modes):
            arm.model.register_forward_hook(self._see_outputs)
        if compares and draws:
            self._began_at, self._numbers = random_state(arm.device), count()
            arm.model.register_forward_pre_hook(self._begin_forward)
            arm.model.register_forward_hook(self._see_draws)

    def start_window(self, reference: Elements | None = None) -> None:
        """Forget the last window; what the optimizer consumes is compared with `reference` at once, where there is one."""
        self.gradient = self.moments = self.consumed = self.last_forward = self.left_over = None
        self.reference = reference
        self.steps_in_window = self.steps_before_last_forward = self._inside = 0
        self._backward_begun = False
        self._idle = None
        self.forwards = {}

    def _leave_step(self, *_: object) -> None:
        self._inside -= 1
        if self._inside == 0 and self.keeps:
            self.written = flatten(gradients(self.parameters)) if self._versions != self._versions_of_gradients() else None

    @property
    def sees_forwards(self) -> bool:
        """Whether the weights of each forward are looked at."""
        return self.began is not None

    @property
    def is_lost(self) -> bool:
        """Whether the last optimizer step consumed what is not finite."""
        return self.gradient is not None and not bool(torch.isfinite(self.gradient).all())

    def _versions_of_gradients(self) -> list[int | None]:
        return [None if p.grad is None else p.grad._version for p in self.parameters]

    def __deepcopy__(self, _memo: object) -> Self:
        """A copy of the model has these hooks as well, and no watch of its own."""
        return self

    def _see_step(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._inside += 1
        if self._inside > 1:  # a step of a class whose own calls that of its parent, both of which torch has wrapped
            return None
        closure = kwargs.get("closure", next(iter(args[1:]), None))
        if closure is None:
            self._see_gradients()
            return None

        def seen() -> Any:
            loss = closure()
            self._see_gradients()
            return loss

        return args[:1], kwargs | {"closure": seen}

    def _see_gradients(self) -> None:
        self._versions = self._versions_of_gradients() if self.keeps else []
        taken = Taken(
            rates=learning_rates(self._optimizer),
            idle=tuple(p.grad is None for p in self.parameters),
            randomness=random_state(self.parameters[0].device) if self.sees_forwards else None,
        )
        if all(taken.idle):
            self._idle = taken  # it does nothing, and is the window's step only where there is no other
        else:
            self._take(taken)

    def end_window(self) -> None:
        """Count a window whose only steps found no gradient: it has consumed zeros."""
        if self.steps_in_window == 0 and self._idle is not None:
            self._take(self._idle)

    def _take(self, taken: Taken) -> None:
        self.steps += 1
        self.steps_in_window += 1
        self.taken = taken
        if any(taken.idle):
            self.missed = [n + is_idle for n, is_idle in zip(self.missed, taken.idle, strict=True)]
        if not self.compares:
            return
        consumed = Elements(gradients(self.parameters))
        self.gradient = consumed.vector() if self.keeps else None
        if self.reference is None:
            self.consumed = consumed.kept()  # an optimizer may write on the gradients that it consumes
        else:
            self.moments = moments_of(consumed, self.reference)

    def _see_outputs(self, _model: nn.Module, _inputs: object, outputs: Any) -> None:
        if transforming() or (self._backward_begun and not self.sees_forwards):
            return
        weights = None
        for output in pytree.tensors(outputs):
            if output.grad_fn is None:  # a parameter, on which a hook would stay
                continue
            if not self._backward_begun:
                output.register_hook(partial(self._see_backward, not all(layer.training for layer in self._modes)))
            if self.began is not None:
                weights = flatten(self.parameters) if weights is None else weights
                others = None if torch.equal(weights, self.began) else weights
                output.register_hook(partial(self._note_forward, others, self.steps_in_window))

    def _begin_forward(self, *_: object) -> None:
        self._began_at = random_state(self.parameters[0].device)

    def _see_draws(self, _model: nn.Module, _inputs: object, outputs: Any) -> None:
        ended = random_state(self.parameters[0].device)
        own = Forward(self._began_at, draws=not all(map(torch.equal, self._began_at, ended)))
        number = next(self._numbers)

        def reached(_gradient: Tensor) -> None:
            self.forwards[number] = own

        for output in () if transforming() else pytree.tensors(outputs):
            if output.grad_fn is not None:
                output.register_hook(reached)

    @property
    def draws(self) -> list[Forward]:
        """Of the window's forwards in their order."""
        return [own for _, own in sorted(self.forwards.items())]

    def count_draws(self, seen: Sequence[Tensor]) -> None:
        """Count the micro-batches of rows `seen` that drew what other rows had drawn, in this window or an earlier one."""
        if len(seen) != len(self.forwards):
            return
        for own, rows in zip(self.draws, seen, strict=True):
            if own.draws:
                others = self.rows_by_draws.setdefault(digest_of(own.began_at), rows)
                self.drawn_again += not bool(torch.isin(rows, others).any())

    def _note_forward(self, weights: Tensor | None, steps: int, _gradient: Tensor) -> None:
        """Note that a backward goes through a forward with these weights; a forward for logging alone has none."""
        self.last_forward, self.steps_before_last_forward = weights, steps

    def _see_backward(self, is_evaluated: bool, _gradient: Tensor) -> None:
        """Note gradients that are there before anything is added to them: the outputs come first in a backward."""
        if self._backward_begun:
            return
        self._backward_begun = True
        self.evaluated += is_evaluated
        if any(p.grad is not None and bool(p.grad.count_nonzero()) for p in self.parameters):
            self.left_over = flatten(gradients(self.parameters))


class LossScale:
    """What float16's overflows did to an arm's loss scale: the windows that the scaler skipped, and the scale without them."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._initial = self._last = self._expected = scaler.get_scale()
        self._good_windows = 0  # since the last overflow or growth
        self.overflows: list[int] = []  # windows, by number

    @property
    def present(self) -> float:
        """The factor of the next window's losses."""
        return self._last

    def end_window(self, step: int, *, stepped: bool) -> None:
        """See the scale at the end of window `step`: one that shrank where there was no optimizer step has met an overflow."""
        if not self._scaler.is_enabled():
            return
        scale, self._last = self._last, self._scaler.get_scale()
        self._good_windows += 1
        if self._last < scale and not stepped:
            self.overflows.append(step)
            self._expected *= self._scaler.get_backoff_factor()
            self._good_windows = 0
        elif self._good_windows == self._scaler.get_growth_interval():
            self._expected *= self._scaler.get_growth_factor()
            self._good_windows = 0

    @property
    def without_overflows(self) -> float:
        """The first scale, unless something else than overflows and the growth between them has changed it."""
        return self._initial * (self._last / self._expected)


@dataclass(frozen=True)
class StepRecord:
    """One arm's optimizer step beside the reference's, each at its own parameters."""

    loss: float
    parameter_distance: float  # ||theta_arm - theta_full|| / ||theta_full - theta_0||
    gradient_norm: float  # ||g_arm|| of what the optimizer consumed; this and the next are NaN when one of the steps was skipped
    gradient_difference_norm: float  # ||g_arm - g_full||
    gradient_distance: float  # this and the next two as in `Comparison`
    scale: float
    cosine: float
    learning_rate: float  # of the first parameter group: with which the step was taken, or would have been
    loss_scale: float | None  # of the window; None where there is none
    gradient_error: (
        float | None
    )  # ||g - g_64|| / ||g_64||: NaN of an arm without an exact gradient, None where none was asked for


class LockStep:
    """A reference arm and its candidates, which step on the same windows together."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        seed: int,
        band: Collection[str] = (),
        offload: Offload | None = None,
        *,
        looks: bool = True,
        draws: bool = False,
    ) -> None:
        """Create the lock step.

        Args:
            arms: By label; the one labelled `REFERENCE` comes first.
            seed: Seeds the random draws of each window.
            band: Labels of controls, of which only the weights are compared.
            offload: Where the tensors of an arm are kept while another arm steps; by default in memory.
            looks: Whether a probe asks what was there when a window's first backward began.
            draws: Whether the models draw random numbers, and it is looked at where each forward begins to.
        """
        self.offload = offload or Offload()
        assert next(iter(arms)) == REFERENCE and REFERENCE not in band
        self.arms, self.seed, self.steps = dict(arms), seed, 0
        self.watches = {label: Watch(arm, compares=label not in band, looks=looks, draws=draws) for label, arm in arms.items()}
        self.began = [self.offload.put(parameter.detach().clone()) for parameter in self.watches[REFERENCE].parameters]
        self.foreign_windows: dict[str, set[int]] = {label: set() for label in arms}  # whose samples were not the window's
        self.foreign_rates = dict.fromkeys(arms, 0)  # windows whose step had another learning rate than the reference's
        self.movement = 0.0  # ||theta_full - theta_0|| after the last step
        self.rates: list[tuple[float, ...]] = []  # the reference's, by window
        groups = arms[REFERENCE].optimizer.param_groups
        self.rate = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        self.loss_scales = {label: LossScale(arm.scaler) for label, arm in arms.items()}

    @property
    def start(self) -> Tensor:
        """[P] float64, the reference's weights before its first step."""
        return flatten(self.began)

    def step(
        self, ids: Tensor, *, gradients: Gradients = "kept", exact: ExactGradient | None = None, around: Around | None = None
    ) -> dict[str, StepRecord]:
        """Train a window in all arms, with one transfer from the device at the end; in float16 two more for each arm.

        GradScaler has to know on the host whether a gradient overflowed, and its scale is read to count such windows.

        Args:
            ids: [n] int64 samples of the window.
            gradients: "kept": every arm's stays in its watch. "alone": `around` alone looks at it. "compared": with the
                reference's, at once, which holds two copies of the parameters however many arms there are: where the reference
                began, and what it consumed.
            exact: Called with an arm's label before its step, one arm after the other: its exact gradient, None for one that
                is not judged.
            around: Called with an arm's label: a context around its window. What it keeps of an arm can be gone before the
                next one is at work.

        Returns:
            Label -> what the step shows.
        """
        window = self.arms[REFERENCE].workload.batch(ids)
        rates = {label: learning_rates(arm.optimizer)[0] for label, arm in self.arms.items()}
        self.rates.append(learning_rates(self.arms[REFERENCE].optimizer))
        scales = {label: scale.present for label, scale in self.loss_scales.items()}
        consumed, errors = None, dict[str, float]()
        with kept_randomness(self.arms[REFERENCE].device):
            for label, watch in self.watches.items():
                with nullcontext() if around is None else around(label):
                    expected = exact(label) if exact is not None else None
                    self._take(label, window, consumed, keeps=gradients != "compared" or expected is not None)
                    if watch.taken is not None and watch.steps_in_window:
                        rates[label] = watch.taken.rates[0]
                    if label == REFERENCE and gradients != "alone":
                        consumed = watch.consumed
                        watch.moments = None if consumed is None else moments_of(consumed, consumed)
                        self.offload.settle(() if consumed is None else consumed.tensors)
                    watch.consumed = None
                    if expected is not None and watch.gradient is not None:
                        errors[label] = relative_distance(watch.gradient, expected)
                    if gradients == "compared":
                        watch.gradient = None
                    if watch.last_forward is not None:
                        watch.last_forward = self.offload.put(watch.last_forward)
                    self.offload.settle(tensors_of(self.arms[label]))
                if watch.gradient is not None:
                    watch.gradient = self.offload.put(watch.gradient) if gradients == "kept" else None
        self.steps += 1
        return self._records(rates, scales, None if exact is None else errors)

    def _records(
        self, rates: Mapping[str, float], scales: Mapping[str, float], errors: Mapping[str, float] | None
    ) -> dict[str, StepRecord]:
        records, seen = {}, self._seen()
        square = seen[REFERENCE][-1]
        for label, (distance, loss, difference, gradient) in seen.items():
            own = comparison((difference, gradient, square, (gradient + square - difference) / 2))
            records[label] = StepRecord(
                loss=loss,
                parameter_distance=self._relative(distance),
                gradient_norm=math.sqrt(gradient),
                gradient_difference_norm=math.sqrt(difference),
                gradient_distance=own.distance,
                scale=own.scale,
                cosine=own.cosine,
                learning_rate=rates[label],
                loss_scale=scales[label] if self.arms[label].scaler.is_enabled() else None,
                gradient_error=None if errors is None else errors.get(label, math.nan),
            )
        return records

    def _take(self, label: str, window: Batch, reference: Elements | None, *, keeps: bool) -> None:
        """Take an arm's step, with its watch looking on; what it consumes is compared with `reference`, where there is one."""
        arm, watch = self.arms[label], self.watches[label]
        watch.start_window(reference)
        watch.keeps = keeps
        start_randomness(self._seed(self.steps), arm.device)
        watch.loss = take_step(arm, window)
        watch.end_window()
        self.loss_scales[label].end_window(self.steps, stepped=watch.steps_in_window > 0)
        if watch.compares:
            self._count(label, window)

    def _seen(self) -> dict[str, list[float]]:
        """Label -> distance of the weights, loss and the two squares of the gradient, NaN where there are none: one transfer."""
        distances = self._distances([watch.parameters for watch in self.watches.values()])
        moments = {label: watch.moments for label, watch in self.watches.items() if watch.moments is not None}
        losses = torch.stack([watch.loss for watch in self.watches.values()])
        self.movement, *values = torch.cat([distances, losses, *moments.values()]).tolist()
        num, rest = len(self.arms), iter(values[2 * len(self.arms) :])
        two = {label: list(islice(rest, 2)) for label in moments}
        return {label: [values[k], values[num + k], *two.get(label, [math.nan] * 2)] for k, label in enumerate(self.arms)}

    def _distances(self, weights: Sequence[Sequence[Tensor]]) -> Tensor:
        """[1 + A]: of the reference's weights to where it began and to each arm's; each is put back before the next is read."""
        others = [self.began, *weights]
        if type(self.offload) is Offload:
            return distances_to(weights[0], others)
        found = []
        for own in others:
            found.append(distances_to(weights[0], [own]))
            self.offload.release()
        return torch.cat(found)

    def _count(self, label: str, window: Batch) -> None:
        """Count what an arm did otherwise than the reference in this window."""
        watch, reference = self.watches[label], self.watches[REFERENCE]
        samples = torch.cat(self.arms[label].seen)
        if not window.holds(samples):
            window = self.arms[label].workload.required(window, samples)
        # Of samples that are used twice the gradient decides: each backward may be one for some of the parameters.
        known = window.holds(samples) or window.holds(samples.unique()) or bool((samples == NO_SAMPLE).any())
        self.foreign_windows[label] |= set() if known else {self.steps}
        watch.count_draws(self.arms[label].seen)
        if watch.steps_in_window and reference.steps_in_window and watch.taken:
            pairs = zip(watch.taken.rates, self.rates[self.steps - self._waited(label)], strict=True)
            self.foreign_rates[label] += not all(same(own, other, self.rate) for own, other in pairs)

    def _waited(self, label: str) -> int:
        """Windows that the scaler skipped, where the arm's schedule took no step either: a convention, as the reference's is."""
        skipped = len(self.loss_scales[label].overflows)
        behind = self.arms[REFERENCE].schedule.last_epoch - self.arms[label].schedule.last_epoch
        return skipped if behind == skipped else 0

    def apart(self, label: str, other: str) -> float:
        """The distance of an arm's weights to another's, relative to the reference's movement."""
        return self._relative(float(distances_to(self.watches[other].parameters, [self.watches[label].parameters])))

    def _relative(self, distance: float) -> float:
        """To the reference's movement."""
        return distance / self.movement if self.movement > 0 else (0.0 if distance == 0 else math.inf)

    def randomness(self, step: int) -> AbstractContextManager[None]:
        """The draws (dropout) of a step: every arm, and the referee, starts it from the same generator state."""
        return fixed_randomness(self._seed(step), self.arms[REFERENCE].device)

    def _seed(self, step: int) -> int:
        return hash_seed(self.seed, step)

    def counters(self, label: str) -> Counts:
        """L2: what must be the same as the reference's, exactly."""
        arm, watch = self.arms[label], self.watches[label]
        buffers = dict(arm.model.named_buffers())
        tracked = [float(value) for name, value in buffers.items() if name.endswith("num_batches_tracked")]
        waited = self._waited(label)  # its rates were compared window by window
        rates = learning_rates(self.arms[REFERENCE if waited else label].optimizer)
        # A window that overflowed ends in the scaler's skip in place of a step: that is float16's, and counts as the step.
        overflows = len(self.loss_scales[label].overflows)
        missed = {p: n for each in self.watches.values() for p, n in zip(each.parameters, each.missed, strict=True)}
        known = dict.fromkeys(name for each in self.arms.values() for name in state_steps(each.optimizer, missed))
        steps, names = state_steps(arm.optimizer, missed), group_names(arm.optimizer)
        return {
            Counter.windows: arm.windows,
            Counter.samples: arm.samples,
            Counter.optimizer_steps: watch.steps + overflows,
            **{Counter.state_step.of(name): steps.get(name, 0.0) + overflows for name in known},
            Counter.schedule_index: arm.schedule.last_epoch + waited,
            **{Counter.learning_rate.of(name): rate for name, rate in zip(names, rates, strict=True)},
            Counter.batches_tracked: max(tracked, default=0.0),
            Counter.loss_scale: self.loss_scales[label].without_overflows,
            Counter.windows_at_another_rate: self.foreign_rates[label],
            Counter.evaluated: watch.evaluated,
            Counter.drawn_again: watch.drawn_again,
        }

    def clipped_share(self, label: str) -> float:
        """Of the arm's windows so far, those whose gradient was clipped."""
        flags = [bool(flag) for flag in self.arms[label].clipped]
        return sum(flags) / max(1, len(flags))

    def differing_counters(self, label: str) -> Differences:
        """The arm's counters that are not the reference's."""
        return differing(self.counters(label), self.counters(REFERENCE), self.rate)


def arm_state(arm: Arm) -> dict[str, Tensor]:
    """Return what an arm carries from step to step besides its weights.

    Args:
        arm: The arm.

    Returns:
        By name, float64 vectors of the optimizer state and of the moving average of the weights.
    """
    ema = {} if arm.ema is None else {"ema": flatten(arm.ema.module.parameters())}
    return optimizer_state(arm.optimizer, arm.model.parameters()) | ema


def carried_by(arm: Arm) -> Snapshot:
    """Collect all that an arm carries from window to window, without copies.

    Args:
        arm: The arm that trains.

    Returns:
        Views of its tensors and numbers, by path.
    """
    roots = {"model": arm.model, "optimizer": arm.optimizer, "schedule": arm.schedule, "scaler": arm.scaler, "ema": arm.ema}
    return snapshot(roots, in_place)
