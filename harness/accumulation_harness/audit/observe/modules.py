"""Every call of a module in one window: what it was given and gave, the slopes of the loss by both, and what it gave again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumulation_harness.audit.evidence import Array, ModuleCall, Operation
from accumulation_harness.audit.observe.frames import line
from accumulation_harness.audit.observe.sample import size_of
from accumulation_harness.audit.observe.tensors import dense, fingerprints, tensors_in
from accumulation_harness.observe.fence import Fence

MOST = 2**25  # elements that are kept of a window; of one with more nothing is told


class Open(NamedTuple):
    """A call under way."""

    module: nn.Module
    call: ModuleCall
    lent: list[Tensor]  # what it was given in place of its arguments' tensors
    operations: Operations | None
    own: Any = None  # the hook behind the module's own, which may change what it gives


class Modules:
    """Collects the calls of the window that is looked at module by module."""

    def __init__(self, fence: Fence, inside: str | None) -> None:
        """`inside`: path of the module that is looked at operation by operation."""
        self.fence, self.inside = fence, inside
        self.calls: list[ModuleCall] = []  # in the order in which they began
        self.ended = 0
        self.under_way: list[Open] = []
        self.names: dict[int, str] = {}  # of the modules of the outermost one
        self.forwards = 0
        self.kept = 0
        self.repeated: Counter[str] = Counter()  # calls that were computed again since the last outermost forward
        self.watched: list[tuple[list[Array], int, list[Tensor]]] = []  # where a slope is to be put, and what makes it up

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A call begins; what it is handed is lent as a view, whose slope is that of this call alone."""
        around = self.under_way[-1].call if self.under_way else None
        if around is None:
            self.names = {id(part): name for name, part in module.named_modules()}
            self.repeated.clear()
        kind = type(module).__name__
        call = ModuleCall(
            path=self.names.get(id(module)) or (kind if around is None else f"{around.path}.{kind}"),
            kind=kind,
            forward=self.forwards,
            begun=len(self.calls),
            parent=None if around is None else around.begun,
            given=self._arrays(tensors_in(list(args))),
            weights=tuple(size_of([p]) for p in module.parameters(recurse=False)),
        )
        lent = tuple(each.view_as(each) if _has_slope(each) else each for each in args)
        last = self.fence.hook(self._behind_hooks)
        own = module.register_forward_hook(last, with_kwargs=True) if module._forward_hooks else None
        one = Open(module, call, [*tensors_in(list(lent))], Operations(self._arrays) if call.path == self.inside else None, own)
        self.under_way.append(one)
        self.calls.append(call)
        self._watch(one.lent, call.by_given)
        if one.operations is not None:
            one.operations.__enter__()  # type: ignore[no-untyped-call]
        return lent if any(a is not b for a, b in zip(args, lent, strict=True)) else None

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It ends with `output`, but for hooks of its own. Of what is inside compiled code, one end alone may be seen."""
        if next((one.own for one in reversed(self.under_way) if one.module is module), self) is None:
            self._end(module, args, kwargs, output)

    def _behind_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The module's own have seen its output."""
        if any(one.module is module for one in self.under_way):
            self._end(module, args, kwargs, output)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while True:
            of, call, lent, operations, own = self.under_way.pop()
            if operations is not None:
                operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                call.operations = operations.done
            if own is not None:
                own.remove()
            if of is module:
                break
        handed, outputs = [*tensors_in(kwargs)], [*tensors_in(output)]
        call.given += self._arrays(handed)
        call.gave = self._arrays(outputs)
        call.formats = tuple(str(each.dtype).removeprefix("torch.") for each in outputs)
        self._watch(handed, call.by_given)
        self._watch(outputs, call.by_gave)
        if operations is not None:
            self._watch_nodes(call.nodes, outputs, [*lent, *handed])
        call.ended, self.ended = self.ended, self.ended + 1
        if not self.under_way:
            call.rows = tuple(row for row, _ in fingerprints(args, kwargs))
            self.forwards += 1

    def leave_again(self, module: nn.Module, output: Any) -> None:
        """A call that was computed again for a backward ends."""
        path = self.names.get(id(module), "")
        same = [one for one in self.calls if one.path == path and one.forward == self.forwards - 1]
        if self.repeated[path] < len(same):
            same[self.repeated[path]].again = self._arrays(tensors_in(output))
        self.repeated[path] += 1

    def found(self, loss_scale: float) -> list[ModuleCall]:
        """The calls; none where they are too large to be kept."""
        for slopes, place, seen in self.watched:
            slopes[place] = _array(torch.stack([dense(each).double() for each in seen]).sum(0) / loss_scale) if seen else None
        for call in self.calls:
            while call.parent is not None and self.calls[call.parent].ended < 0:
                call.parent = self.calls[call.parent].parent
        return [call for call in self.calls if call.ended >= 0] if self.kept <= MOST else []

    def _arrays(self, tensors: Iterable[Tensor]) -> list[Array]:
        found = []
        for tensor in tensors:
            self.kept += tensor.numel()
            found.append(_array(tensor) if self.kept <= MOST else None)
        return found

    def _watch(self, tensors: Iterable[Tensor], into: list[Array]) -> None:
        for tensor in tensors:
            if tensor.requires_grad and self.kept <= MOST:
                seen: list[Tensor] = []
                self.watched.append((into, len(into), seen))
                tensor.register_hook(self.fence.hook(lambda slope, seen=seen: seen.append(slope.detach().clone())))
            into.append(None)

    def _watch_nodes(self, nodes: list[Operation], outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """The nodes of the backward between what a call gave and what it was given, nearest first."""
        met = {id(each.grad_fn) for each in given}
        waiting = deque(each.grad_fn for each in outputs)
        while waiting:
            node = waiting.popleft()
            if node is None or id(node) in met:
                continue
            met.add(id(node))
            waiting.extend(after for after, _ in node.next_functions)
            if node.name().endswith("AccumulateGrad"):
                continue
            place = len(nodes)
            nodes.append(Operation(node.name(), (), ()))

            def seen(gave: Any, given: Any, place: int = place, name: str = node.name()) -> None:
                nodes[place] = Operation(name, self._arrays_of(given), self._arrays_of(gave))

            node.register_hook(self.fence.hook(seen))

    def _arrays_of(self, slopes: Sequence[Tensor | None]) -> list[Array]:
        return [None if slope is None else self._arrays([slope])[0] for slope in slopes]


class Operations(TorchDispatchMode):
    """Keeps what every operation gives."""

    def __init__(self, arrays: Callable[[Iterable[Tensor]], list[Array]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arrays = arrays
        self.done: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        gave = func(*args, **(kwargs or {}))
        self.done.append(Operation(func.overloadpacket.__name__, (), self.arrays(tensors_in(gave)), line()))
        return gave


def _has_slope(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is Tensor and value.requires_grad and not value.is_leaf


def _array(tensor: Tensor) -> Array:
    if tensor.is_meta or tensor.is_nested:
        return None
    return dense(tensor).to("cpu", torch.float64).numpy().copy()
