"""Where the loss is looked at: the results of PyTorch's loss functions, else the slope at the outputs of the watched model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.compare.readings import Constant
from accumulation_harness.observe.fence import Fence, See, Seeing, is_the_runs
from accumulation_harness.observe.graph import MARK, Way, are_apart, leads_to, mark, marked, operation, shape, ways
from accumulation_harness.observe.patches import Place
from accumulation_harness.observe.tensors import is_plain, is_result, is_transformed
from accumulation_harness.watch.slopes import Bend, Forms, Loss, Slope, Taken, bent, constantly, labelled, measured, received
from accumulation_harness.watch.terms import Said, of_its_own, spread

LARGE = 1 << 20  # logits that are looked at in a sample of windows only
MOST_UNUSED = 256  # losses of a window that no backward has differentiated yet
MOST = 4  # outputs of a model that may be logits
BY_CLASS = ("cross_entropy", "nll_loss")
BY_ELEMENT = {  # loss functions of PyTorch that have a term for every element
    "mse_loss": Loss.squared,
    "binary_cross_entropy": Loss.binary,
    "binary_cross_entropy_with_logits": Loss.binary,
    "l1_loss": Loss.absolute,
    "smooth_l1_loss": Loss.smooth,
    "huber_loss": Loss.huber,
    "kl_div": Loss.divergence,
    "gaussian_nll_loss": Loss.gaussian,
    "poisson_nll_loss": Loss.poisson,
    "soft_margin_loss": Loss.soft_margin,
}
BY_ROW = {  # and for every row
    "multi_margin_loss": Loss.margin,
    "multilabel_margin_loss": Loss.margin,
    "multilabel_soft_margin_loss": Loss.soft_margin,
    "ctc_loss": Loss.sequences,
}
SEQUENCES = {"input": "log_probs", "target": "targets"}  # arguments of a loss function, and their names in `ctc_loss`
BENT = "accumulation_harness bend"  # of the node of a tensor that the run has hooked
OUTPUT = "accumulation_harness output"  # of the watched model
TRIALS = 4  # backwards in which it is seen whether a loss of the run's own has terms of rows of their own
KEPT_OUT = ("hidden_states", "attentions", "past_key_values", "last_hidden_state")


def _arithmetic() -> torch.dtype | None:
    """What autocast computes in here; None where it is off."""
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class Heads:
    """The logits of the micro-batch under way."""

    def __init__(self, fence: Fence, *, rows_apart: bool) -> None:
        self.fence, self.rows_apart = fence, rows_apart
        self.detail = True
        self._called = False  # a loss function is under way
        self._outputs: list[Forms] = []
        self._losses: list[Forms] = []
        self._fed = False
        self._forwards = 0  # since the last backward
        self._passed_over = False
        self.autocast: torch.dtype | None = None  # of the last forward
        self._inside = False  # whether a layer of the forward under way has told
        self._rows = 0  # of the inputs of the forwards since the last backward
        self._number = 0  # of the losses that were followed
        self._constants: dict[int, tuple[Constant, ...]] = {}  # of those that the backward under way differentiates
        self._others = False
        self._beside = False  # whether a loss function's result is a term of the loss beside something else
        self._bends: dict[int, Bend] = {}  # by hooks of the run's own, in the backward under way
        self._unused: dict[int, Tensor] = {}  # values of those that no backward has differentiated yet
        self.said: Said | None = None  # of the next loss
        self._own: list[Forms] = []  # losses of the run's own
        self._handles: list[Any] = []  # of the hooks that look at them
        self._apart: dict[Hashable, list[bool | None]] = {}  # whether their terms hang on rows of their own

    def before(self, root: Any) -> None:
        """A backward begins at this root."""
        self._losses, self._outputs = [], []  # differentiated for something else (a penalty, a kernel's own backward)
        found = ways(root)
        self._constants = {way.number: way.constants for way in found if way.number is not None}
        for number in self._constants:
            self._unused.pop(number, None)
        own = [way for way in found if way.number is None and 0 not in shape(way.leaf)]
        apart = [self._are_apart(way) for way in own]
        seen_to_sum = all(way.summed is not None for way in own)
        vouched = self.said is not None or (self.rows_apart and seen_to_sum)  # where it cannot be seen
        known = len({way.summed for way in own}) == len(own) and False not in apart and (vouched or None not in apart)
        self._others = not known
        self._beside = bool(self._constants) or (self._others and _is_beside(own))
        for way in own if known else ():
            self._listen(way, self._rows_of_one, self.said)

    def _are_apart(self, way: Way) -> bool | None:
        """Whether a value that a loss adds up is a sum of terms that hang on rows of their own; None: not known."""
        if way.summed is None or any(len(node._input_metadata) > 1 for node in (way.summed, way.leaf)):
            return None
        seen = self._apart.setdefault((operation(way.leaf), operation(way.summed), len(shape(way.leaf))), [])
        if self.detail and len(seen) < TRIALS:
            self.fence.paused = True
            try:
                seen.append(are_apart(way.leaf, OUTPUT))
            finally:
                self.fence.paused = False
        return False if False in seen else None if None in seen or not seen else True

    @property
    def _rows_of_one(self) -> int:
        """Of a forward since the last backward."""
        return self._rows // max(1, self._forwards)

    def _listen(self, way: Way, rows: int, said: Said | None) -> None:
        """Look at the gradient that a value of the run's own receives."""

        def look(given: Sequence[Tensor | None]) -> None:
            if is_plain(given[0]):
                self._own.append(of_its_own(given[0], way, rows, said))

        self._handles.append((way.summed or way.leaf).register_prehook(self.fence.hook(look)))

    def taken(self) -> Taken:
        """The backward has ended."""
        heads = self._losses or self._outputs
        at_heads = {form.bend for forms in heads for form in forms}
        bends = [bend._replace(factor=None) if number in at_heads else bend for number, bend in self._bends.items()]
        found: list[Forms] = [[self._of_samples(form) for form in forms] for forms in heads]
        others, own = self._others and bool(self._losses) and self._beside, self._own
        if own and self._losses:
            found, own = [*found, *own], []
        fed, unseen = self._fed, self._passed_over and not found
        self._outputs, self._losses, self._fed, self._passed_over = [], [], False, False
        self._constants, self._others, self._rows, self._bends, self._own = {}, False, 0, {}, []
        for handle in self._handles:
            handle.remove()
        self._handles, said, self.said = [], self.said is not None, None
        return Taken(None if unseen else found, fed, self.forgotten(), others, bends, own, said)

    def _of_samples(self, form: Slope) -> Slope:
        """Outputs may have a row for every position."""
        rows = self._rows if self._rows and form.rows % self._rows == 0 else form.rows
        return form._replace(rows=rows, bend=self._bends.get(form.bend))

    def unused(self) -> list[Tensor]:
        """Values of the losses that were not differentiated since the last step, from now on counted anew."""
        values, self._unused = list(self._unused.values()), {}
        return values

    def forgotten(self) -> int:
        """Forwards that no backward has followed, from now on counted anew."""
        forwards, self._forwards = self._forwards, 0
        return forwards

    def see(self, args: Any, kwargs: Any, output: Any) -> None:
        """A forward of the model in training mode."""
        self._forwards += 1
        if not self._inside:
            self.autocast = _arithmetic()
        self._inside = False
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim()]
        self._rows += given[0].shape[0] if given else 0
        self._fed = self._fed or any(map(_is_made, (*args, *kwargs.values())))
        for z in list(_logits(output))[:MOST]:
            if _is_followed(z) and not z.is_leaf:
                mark(z, 0, OUTPUT)
                self._look_at(z)

    def inside(self) -> None:
        """A layer's forward begins: trainers put the arithmetic of autocast inside the model's own forward."""
        self.autocast, self._inside = _arithmetic(), True

    def functions(self) -> Mapping[Place, See]:
        """The loss functions, and who sees their calls."""
        kinds = {**BY_ELEMENT, **BY_ROW}
        return {
            (Tensor, "register_hook"): self._hooked,
            **{(functional, name): self._looking(name, self._of_classes) for name in BY_CLASS},
            **{(functional, name): self._looking(name, self._by_element(kind, name in BY_ROW)) for name, kind in kinds.items()},
        }

    def _looking(self, name: str, look: Callable[[Tensor, Mapping[str, Any]], None]) -> See:
        """Look at the result of a loss function, and its arguments by name; not where it was called by itself (by modes, say)."""
        signature = inspect.signature(getattr(functional, name))

        def see(*args: Any, **kwargs: Any) -> Seeing:
            inner, self._called = self._called, True
            try:
                loss = yield
            finally:
                self._called = inner
            if not inner and _is_followed(loss):
                look(loss, signature.bind_partial(*args, **kwargs).arguments)

        return see

    def _hooked(self, tensor: Tensor, hook: Any = None) -> Seeing:
        """The run hooks a tensor on the way of gradients: what comes in and what its hooks make of it are compared."""
        node: Any = tensor.grad_fn if _is_followed(tensor) else None
        if node is None or tensor.numel() < 2 or BENT in node.metadata or not is_the_runs(hook):
            return
        number = self._number = self._number + 1
        before: list[Tensor] = []
        place = tensor.output_nr
        mark(tensor, number, BENT)

        def first(g: Tensor) -> None:
            before[:] = [g.detach().clone()]  # which a hook may write to

        def last(found: Sequence[Tensor | None]) -> None:
            after = found[place]
            if before and after is not None:
                self._bends[number] = bent(before.pop(), after)

        tensor.register_hook(self.fence.hook(first))
        node.register_prehook(self.fence.hook(last))
        yield

    def _of_classes(self, loss: Tensor, given: Mapping[str, Any]) -> None:
        z, target, weight = given.get("input"), given.get("target"), given.get("weight")
        if not is_result(z) or not is_plain(target) or z.dim() < 2:
            return
        ignore, detail = given.get("ignore_index", -100), self.detail
        classes, num = z.shape[1], z.numel() // z.shape[1]  # the hook must not keep the logits

        def numbers(u: Tensor, of: Tensor, reduction: str) -> Slope:
            if target.is_floating_point():  # probabilities
                return received(Loss.cross_entropy, u, of, reduction, num)
            y = target.reshape(-1)
            counted = y != ignore
            own = counted.float() if weight is None else weight.detach().float()[y.where(counted, 0)] * counted
            found = received(Loss.cross_entropy, u, of, reduction, own)
            return labelled(found, y, classes) if detail else found

        self._follow(loss, given, z, classes, numbers, z.shape[0])

    def _by_element(self, kind: Loss, by_row: bool) -> Callable[[Tensor, Mapping[str, Any]], None]:
        def look(loss: Tensor, given: Mapping[str, Any]) -> None:
            z, target = (given.get(name, given.get(of_sequences)) for name, of_sequences in SEQUENCES.items())
            detail = self.detail
            weighted = kind is not Loss.binary and given.get("weight") is not None  # a mean over its weights
            if not is_result(z) or not is_plain(target) or target.requires_grad or weighted:
                return
            rows = z.shape[0] if z.dim() else 1
            if "target_lengths" in given:
                rows = torch.as_tensor(given["target_lengths"]).numel()
            num = rows if by_row else torch.broadcast_shapes(z.shape, target.shape).numel()

            def numbers(u: Tensor, of: Tensor, reduction: str) -> Slope:
                many, reduction = (rows, "mean") if reduction == "batchmean" else (num, reduction)
                return constantly(received(kind, u, of, reduction, many), target if detail else None)

            of_rows = z.dim() < 2 or given.get("reduction") == "batchmean"
            self._follow(loss, given, z, 1 if of_rows else z.shape[-1], numbers, rows)

        return look

    def _follow(
        self,
        loss: Tensor,
        given: Mapping[str, Any],
        z: Tensor,
        classes: int,
        numbers: Callable[[Tensor, Tensor, str], Slope],
        rows: int,
    ) -> None:
        """Look at the gradient that a loss function's result receives."""
        old = given.get("size_average") is not None or given.get("reduce") is not None
        if old:
            return
        value, reduction = loss.detach().clone(), given.get("reduction", "mean")
        number = self._number = self._number + 1
        node: Any = loss.grad_fn
        logits = z.grad_fn
        mark(loss, number)
        if len(self._unused) < MOST_UNUSED:
            self._unused[number] = value.sum().reshape(1)

        def look(given: Sequence[Tensor | None]) -> None:
            (u,) = given
            if u is not None:
                self._unused.pop(number, None)
                constants, bend = self._constants.get(number), marked(logits, BENT)
                found = numbers(u, value, reduction)._replace(rows=rows, classes=classes, constants=constants, bend=bend)
                seen, said = reduction == "none" and constants is not None, self.said
                masked = spread(found, u.detach(), self._rows_of_one) if seen else ()
                if said is not None:
                    masked = map(said.counted, masked)
                self._losses.append([found, *masked])

        node.register_prehook(self.fence.hook(look))  # behind the hooks that the run has on the loss

    def _look_at(self, z: Tensor) -> None:
        """Look at the slope of the loss at logits, if no loss function has told what it is."""
        if z.numel() > LARGE and not self.detail:
            self._passed_over = True
            return
        logits, rows, z_node = z.detach(), z.shape[0] if z.dim() else 1, z.grad_fn

        def look(g: Tensor) -> None:
            if not self._losses and (self.said is None or self._others):
                of: dict[str, Any] = {"rows": rows, "classes": logits.shape[-1] if logits.dim() > 1 else 1}
                of |= {"dtype": _narrower(g.dtype, logits.dtype), "bend": marked(z_node, BENT)}
                self._outputs.append([form._replace(**of) for form in measured(logits, g.detach())])

        z.register_hook(self.fence.hook(look))


def _is_beside(ways: Sequence[Way]) -> bool:
    """Whether some of the addends are made of results of loss functions, and others are not."""
    of_losses = [leads_to(way.leaf, MARK) for way in ways] if len(ways) > 1 else []
    return any(of_losses) and not all(of_losses)


def _is_followed(tensor: Any) -> bool:
    return is_plain(tensor) and tensor.requires_grad and torch.is_grad_enabled() and not is_transformed(tensor)


def _is_made(given: Any) -> bool:
    """Whether it was made of parameters; data asks for its gradient where there is a penalty on it."""
    made = isinstance(given, torch.nn.Parameter) or (isinstance(given, Tensor) and given.grad_fn is not None)
    return made and given.requires_grad


def _logits(output: Any) -> Iterator[Tensor]:
    """The tensors of an output that may be logits."""
    if isinstance(output, Tensor):
        if output.dim() and output.is_floating_point() and output.requires_grad:
            yield output
        return
    named: Mapping[Any, Any] = {}
    if isinstance(output, Mapping):
        named = output
    elif isinstance(output, (tuple, list)):
        named = dict(enumerate(output[:MOST]))
    elif dataclasses.is_dataclass(output):
        named = vars(output)
    known = named.get("logits")
    for name, value in {"logits": known}.items() if isinstance(known, Tensor) else named.items():
        if isinstance(value, (Tensor, Mapping)) and name not in KEPT_OUT:
            yield from _logits(value)


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other
