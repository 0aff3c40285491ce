"""Every call of a module in one window: what it was given and gave, the slopes of the loss by both, and what it gave again."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accumulation_harness.audit.evidence import Array, ModuleCall, Operation, Values
from accumulation_harness.audit.observe.sample import size_of
from accumulation_harness.audit.observe.tensors import dense, fingerprints, tensors_in
from accumulation_harness.observe.fence import Fence

OURS = __name__.partition(".")[0]
MOST = 2**25  # elements that are kept of a window; of one with more nothing is told


@dataclass(eq=False)
class Open:
    """A call as it is seen."""

    path: str
    kind: str
    forward: int  # outermost forwards of the window before it
    parent: Open | None
    given: list[Array]
    lent: list[Tensor] = field(default_factory=list)  # what it was given in place of its arguments' tensors
    gave: list[Array] = field(default_factory=list)
    again: list[Array] = field(default_factory=list)  # when it was computed again for a backward
    formats: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    operations: Operations | None = None
    nodes: list[Operation] = field(default_factory=list)
    by_given: dict[int, list[Tensor]] = field(default_factory=dict)  # place -> slopes of the loss
    by_gave: dict[int, list[Tensor]] = field(default_factory=dict)


class Modules:
    """Collects the calls of the window that is looked at module by module."""

    def __init__(self, fence: Fence, inside: str | None) -> None:
        """`inside`: path of the module that is looked at operation by operation."""
        self.fence, self.inside = fence, inside
        self.calls: list[Open] = []  # in the order in which they began
        self.ended: list[Open] = []  # in the order in which they ended
        self.under_way: list[Open] = []
        self.names: dict[int, str] = {}  # of the modules of the outermost one
        self.forwards = 0
        self.kept = 0
        self.repeated: Counter[str] = Counter()  # calls that were computed again since the last outermost forward

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A call begins; what it is handed is lent as a view, whose slope is that of this call alone."""
        if not self.under_way:
            self.names = {id(part): name for name, part in module.named_modules()}
            self.repeated.clear()
        kind = type(module).__name__
        path = self.names.get(id(module)) or (kind if not self.under_way else f"{self.under_way[-1].path}.{kind}")
        one = Open(path, kind, self.forwards, self.under_way[-1] if self.under_way else None, [])
        self.under_way.append(one)
        self.calls.append(one)
        one.given = self._arrays(tensors_in(list(args)))
        one.weights = tuple(size_of([p]) for p in module.parameters(recurse=False))
        lent = tuple(each.view_as(each) if _has_slope(each) else each for each in args)
        one.lent = [*tensors_in(list(lent))]
        self._watch(one.lent, one.by_given)
        if path == self.inside:
            one.operations = Operations(self._arrays)
            one.operations.__enter__()  # type: ignore[no-untyped-call]
        return lent if any(a is not b for a, b in zip(args, lent, strict=True)) else None

    def leave(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """It ends with `output`."""
        one = self.under_way.pop()
        if one.operations is not None:
            one.operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        handed = [*tensors_in(kwargs)]
        self._watch(handed, one.by_given, len(one.given))
        one.given += self._arrays(handed)
        outputs = [*tensors_in(output)]
        one.gave = self._arrays(outputs)
        one.formats = tuple(str(each.dtype).removeprefix("torch.") for each in outputs)
        self._watch(outputs, one.by_gave)
        if one.operations is not None:
            self._watch_nodes(one, outputs, [*one.lent, *handed])
        self.ended.append(one)
        if not self.under_way:
            one.rows = tuple(row for row, _ in fingerprints(args, kwargs))
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
        if self.kept > MOST:
            return []
        begun = {id(one): place for place, one in enumerate(self.calls)}
        return [
            ModuleCall(
                path=one.path,
                kind=one.kind,
                forward=one.forward,
                begun=begun[id(one)],
                ended=ended,
                parent=None if one.parent is None else begun[id(one.parent)],
                rows=one.rows,
                weights=one.weights,
                given=Values(one.given, _slopes(one.by_given, len(one.given), loss_scale)),
                gave=Values(one.gave, _slopes(one.by_gave, len(one.gave), loss_scale)),
                again=tuple(one.again),
                formats=one.formats,
                operations=() if one.operations is None else one.operations.done,
                nodes=one.nodes,
            )
            for ended, one in enumerate(self.ended)
        ]

    def _arrays(self, tensors: Iterable[Tensor]) -> list[Array]:
        found = []
        for tensor in tensors:
            self.kept += tensor.numel()
            found.append(_array(tensor) if self.kept <= MOST else None)
        return found

    def _watch(self, tensors: Iterable[Tensor], into: dict[int, list[Tensor]], first: int = 0) -> None:
        for place, tensor in enumerate(tensors, first):
            if tensor.requires_grad and self.kept <= MOST:
                slopes = into[place] = []
                tensor.register_hook(self.fence.hook(lambda slope, slopes=slopes: slopes.append(slope.detach().clone())))

    def _watch_nodes(self, one: Open, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
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
            place = len(one.nodes)
            one.nodes.append(Operation(node.name(), (), ()))

            def seen(gave: Any, given: Any, place: int = place, name: str = node.name()) -> None:
                one.nodes[place] = Operation(name, self._arrays_of(given), self._arrays_of(gave))

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
        self.done.append(Operation(func.overloadpacket.__name__, (), self.arrays(tensors_in(gave)), _line()))
        return gave


def _line() -> str:
    """The innermost line under way that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("torch", OURS):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _has_slope(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value) is Tensor and value.requires_grad and not value.is_leaf


def _array(tensor: Tensor) -> Array:
    if tensor.is_meta or tensor.is_nested:
        return None
    return dense(tensor).to("cpu", torch.float64).numpy().copy()


def _slopes(seen: dict[int, list[Tensor]], count: int, loss_scale: float) -> list[Array]:
    found: list[Array] = [None] * count
    for place, slopes in seen.items():
        if slopes and place < count:
            found[place] = _array(torch.stack([dense(each).double() for each in slopes]).sum(0) / loss_scale)
    return found
