"""What a run holds in numbers at every window's start, by path: in its models, optimizers, schedules and local variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from accumulation_harness.audit.evidence import HELD, Held, Intervention, Role, Run, Vector
from accumulation_harness.audit.observe.generators import Generators
from accumulation_harness.audit.observe.variables import local_variables, places
from accumulation_harness.system.state import Snapshot, in_place, snapshot

WHOLE = 2**17  # elements of a tensor that is kept whole where that was asked for
MOST_OBJECTS = 20_000  # looked into at each look: the nearest ones


class States:
    """Looks at all that the local variables of the audited code lead to, and writes what moved into the run."""

    def __init__(self, run: Run, what: Intervention, generators: Generators) -> None:
        self.run, self.what, self.generators = run, what, generators
        self.held = Held()
        self._roots: dict[str, object] = {}
        self._elsewhere: dict[str, object] = {}  # what has a role, and no local variable leads to
        self._begun: tuple[int, int] | None = None  # window and number of the micro-batch under way
        self._first: dict[str, Tensor] = {}  # what the window's first micro-batch found
        self._leaves: dict[str, weakref.ref[Tensor]] = {}

    def restart(self) -> None:
        """Training begins: what came before was none of it."""
        self._begun = None
        for seen in (self.held.states, self.held.starts, self.held.noted):
            seen.clear()

    def _now(self, keep: Callable[[Tensor], Tensor] = in_place) -> Snapshot:
        with _disable_current_modes():  # one that rounds once would widen buffers of gigabytes
            return snapshot(self._roots, keep, most=MOST_OBJECTS)

    def look(self, known: Mapping[Role, Sequence[object]]) -> Mapping[int, str]:
        """A window begins; where objects are. `known`: what has a role in training, wherever it is."""
        self._roots = {**local_variables(), **self._elsewhere}
        found = self._now(_sampled)
        reached = ("weight", "state")  # by the others
        lost = [(role, one) for role, each in known.items() for one in each if role not in reached and id(one) not in found.paths]
        for role, one in lost:
            self._elsewhere[f"{role} {len(self._elsewhere)}" if role in self._roots else role] = one
        if lost:
            self._roots |= self._elsewhere
            found = self._now(_sampled)
        self._see(found, known)
        if len(self.held.states) == 2 and self.what.starts is None:
            self._shake()
        return found.paths

    @torch.no_grad()
    def _shake(self) -> None:
        """Put other values in the place of these; of whole numbers only in a model: a loop's may be those of rows."""
        models = tuple(f"{path}." for path, role in self.held.roles.items() if role == "model")
        for path, value in self._now().values.items() if self.what.shake else ():
            if path not in self.what.shake or not isinstance(value, Tensor) or value.dtype == torch.bool:
                continue
            if value.is_floating_point() or path.startswith(models):
                value.data.add_(1 + value.abs())
                self.held.shaken.add(path)

    def finish(self, known: Mapping[Role, Sequence[object]]) -> None:
        """The function has returned: what its local variables held as the last window began is looked at once more."""
        held = self.held
        if not held.states:
            return
        self._see(self._now(_sampled), known)
        held.settle()
        self.run.held = held
        self._roots, self._elsewhere, self._first, self.held = {}, {}, {}, Held()

    def _see(self, found: Snapshot, known: Mapping[Role, Sequence[object]]) -> None:
        self.held.states.append(_vectors(found))
        self.held.numbers |= {path for path, value in found.values.items() if not isinstance(value, Tensor)}
        for role, objects in known.items():
            self.held.roles |= {found.paths[id(one)]: role for one in objects if id(one) in found.paths}
        self.generators.know(found.generators)
        self._leaves = {path: weakref.ref(leaf) for path, leaf in found.leaves.items() if self.held.roles.get(path) != "weight"}

    def reached(self, copied: Collection[int]) -> None:
        """A backward has ended: what it gave gradients, and no optimizer holds (nor copies of it), is trained by hand."""
        for path, known in self._leaves.items():
            leaf = known()
            if leaf is not None and leaf.grad is not None:
                self.held.roles.setdefault(path, "weight" if id(leaf) in copied else "trained")

    def begin(self, window: int, number: int, models: Sequence[object]) -> None:
        """The first forward of a micro-batch is about to begin."""
        what = self.what
        if (window, number) == self._begun or not (what.hold or what.note or what.starts == window):
            return
        self._begun = window, number
        self._roots = {**local_variables(), **self._elsewhere}
        if what.starts == window and number < 2:
            self.held.starts.append(_vectors(self._now(_sampled)))
            if not number:
                self._shake()
        if what.note and not number:
            values = self._now().values
            known = {path: _vector(values[path]) for path in what.note & values.keys()}
            self.held.noted.append({path: value for path, value in known.items() if value.size <= WHOLE})
        if what.hold:
            self._hold(window, models, first=not number)

    @torch.no_grad()
    def _hold(self, window: int, models: Sequence[object], *, first: bool) -> None:
        """Put what the other run found as its window began; where that is not known, what the first micro-batch found."""
        now = self._now()
        usual = self.what.hold_as.noted if self.what.hold_as is not None else ()
        wanted = usual[window] if window < len(usual) else {}
        for path in self.what.hold & now.values.keys():
            tensor = now.values[path]
            if not isinstance(tensor, Tensor):
                continue
            if path in wanted and wanted[path].size == tensor.numel():
                tensor.data.copy_(torch.from_numpy(wanted[path]).reshape(tensor.shape))
            elif first:
                self._first[path] = tensor.clone()
            elif path in self._first and self._first[path].shape == tensor.shape:
                tensor.data.copy_(self._first[path])
        for module in (part for model in models if isinstance(model, nn.Module) for part in model.modules()):
            for name, value in vars(module).items():
                path = f"{now.paths.get(id(module))}.{name}"
                if path in wanted and type(value) in (int, float):
                    vars(module)[name] = type(value)(wanted[path][0])


def _vector(value: Any) -> Vector:
    """In float64; a number as a vector of one element."""
    if isinstance(value, Tensor):
        return np.asarray(value.to("cpu", torch.float64, copy=True).reshape(-1).numpy())
    return np.array([value.real, value.imag] if isinstance(value, complex) else [value], dtype=np.float64)


def _vectors(found: Snapshot) -> dict[str, Vector]:
    return {path: _vector(value) for path, value in found.values.items()}


def _sampled(tensor: Tensor) -> Tensor:
    """A few elements of a large tensor, the same places in all of that size."""
    flat = tensor.detach().reshape(-1)
    return (flat if len(flat) <= HELD else flat[torch.from_numpy(places(len(flat))).to(flat.device)]).clone()
