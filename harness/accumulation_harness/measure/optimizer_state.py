"""What an optimizer carries from step to step, whatever its class: read as numbers, and copied whole onto other parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from accumulation_harness.config import ConfigError
from accumulation_harness.referee.gradients import flatten, group_names

NUMBERS = (int, float, Tensor)
STEP = "step"  # an optimizer counts its steps by this name, for each parameter or each group: compared as a counter


def optimizer_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the state of an optimizer as vectors.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters, in the order wanted.

    Returns:
        By name of the entry (`exp_avg`, ...), a float64 vector over all parameters. A list or mapping is flattened. A parameter
        without an entry that others have in their own shape (it never had a gradient) has zeros. The counter `step`, and what
        is neither a tensor nor a number, are left out.
    """
    own = [(p, _entries_of(optimizer, p)) for p in parameters]
    found = {}
    for name in dict.fromkeys(name for _, state in own for name in state if name != STEP):
        has_shape = all(name not in state or getattr(state[name], "shape", None) == p.shape for p, state in own)
        absent = torch.zeros_like if has_shape else lambda p: ()
        values = [leaf for p, state in own for leaf in _leaves(state[name] if name in state else absent(p), p.device)]
        if values:
            found[name] = flatten(values)
    return found


def _entries_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    states = [one.state.get(parameter, {}) for one in with_inner(optimizer)]
    return {str(name): value for state in states for name, value in state.items() if value is not None}


def _leaves(value: object, device: torch.device) -> Iterator[Tensor]:
    """The tensors and numbers in a nest of lists and dictionaries, real and on the device; parameters are passed over."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, NUMBERS) and not isinstance(leaf, nn.Parameter):
            number = torch.as_tensor(leaf, device=device)
            yield (torch.view_as_real(number) if number.is_complex() else number).double()


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The tensors that are kept for single parameters, as they are.

    Args:
        optimizer: Any optimizer.

    Returns:
        Tensors, not copied.
    """
    states = [state for one in with_inner(optimizer) for state in one.state.values() if isinstance(state, dict)]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def state_steps(optimizer: Optimizer, missed: Mapping[nn.Parameter, int]) -> dict[str, float]:
    """Average the counters called `step` of each parameter group, the group's own and its parameters'.

    Args:
        optimizer: Any optimizer.
        missed: Steps at which a parameter had no gradient, which are counted with its own.

    Returns:
        Name of the group -> mean.
    """
    found = {}
    for name, group in zip(group_names(optimizer), optimizer.param_groups, strict=True):
        states = [(0, group), *((missed.get(p, 0), one.state.get(p)) for one in with_inner(optimizer) for p in group["params"])]
        counters = [n + float(one[STEP]) for n, one in states if isinstance(one, dict) and isinstance(one.get(STEP), NUMBERS)]
        if counters:
            found[name] = sum(counters) / len(counters)
    return found


def learning_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """Read the learning rate of each parameter group, in order.

    Args:
        optimizer: Any optimizer.

    Returns:
        One for each group.
    """
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def set_learning_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """One for each parameter group; a rate that is a tensor stays one.

    Args:
        optimizer: Any optimizer.
        rates: One for each parameter group.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds as attributes (Muon for the matrices beside Adam for the rest, say).

    Args:
        optimizer: Any optimizer.

    Returns:
        The outer one first.
    """
    found = [optimizer]
    for one in found:
        found += [
            inner for value in vars(one).values() for inner in _optimizers_in(value) if all(inner is not other for other in found)
        ]
    return found


def _optimizers_in(value: object) -> list[Optimizer]:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return [member for member in members if isinstance(member, Optimizer)]


def copied(optimizer: Optimizer, parameters: Sequence[Tensor]) -> tuple[Optimizer, list[nn.Parameter]]:
    """Copy an optimizer, with all groups, state and attributes, so that it steps copies of the parameters and shares nothing.

    Hooks that others have registered, and a schedule's wrapper around `step`, stay with the original.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters.

    Returns:
        The copy, and the copies of the parameters in their order.

    Raises:
        ConfigError: An attribute cannot be copied.
    """
    own = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    memo: dict[int, Any] = {id(p): twin for p, twin in zip(parameters, own, strict=True)}
    for p, twin in zip(parameters, own, strict=True):
        vars(twin).update({name: _copy_of(optimizer, name, value, memo) for name, value in vars(p).items()})
    originals = with_inner(optimizer)
    for one in originals:  # without `Optimizer.__getstate__`, which leaves attributes out
        memo[id(one)] = object.__new__(type(one))
    for one in originals:
        for name, value in vars(one).items():
            if name != STEP:
                vars(memo[id(one)])[name] = _copy_of(one, name, value, memo)
    return memo[id(optimizer)], own


def _copy_of(optimizer: Optimizer, name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name.endswith("_hooks"):
        value = OrderedDict((key, hook) for key, hook in value.items() if getattr(hook, "__self__", None) is optimizer)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # whatever a class of the user's own raises
        expected = f"an optimizer that can be copied; its {name} cannot: {error}"
        raise ConfigError("optimizer", type(optimizer).__name__, expected) from error


def step_in_float32(optimizer: Optimizer) -> None:
    """Let an optimizer that knows no float64 step float64 parameters: it meets them, and their gradients, rounded to float32.

    It becomes one of a subclass, so that hooks on its steps see the gradients before they are rounded, and copies of it step
    as it does.

    Args:
        optimizer: Any optimizer; its state is in the formats that it chooses.
    """
    optimizer.__class__ = _in_float32(type(optimizer))  # type: ignore[arg-type]


@cache
def _in_float32(cls: type[Optimizer]) -> type[Optimizer]:
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        kept: list[tuple[Tensor, Tensor, Tensor | None]] = []

        def narrow() -> None:
            each = {id(p): p for one in with_inner(self) for group in one.param_groups for p in group["params"]}
            kept[:] = [(p, p.data, p.grad) for p in each.values()]
            for p, value, gradient in kept:
                p.grad = None
                p.data = value.float()
                p.grad = None if gradient is None else gradient.float()

        def widen() -> None:
            for p, value, gradient in kept:
                own, p.grad = p.grad, None
                p.data = value.copy_(p.data)
                if gradient is not None and own is not None and own._version:  # it writes on the gradients that it consumes
                    gradient.copy_(own)
                p.grad = gradient

        def evaluated() -> Any:
            assert closure is not None
            widen()
            loss = closure()
            narrow()
            return loss

        narrow()
        try:
            return cls.step(self) if closure is None else cls.step(self, evaluated)
        finally:
            widen()

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "step": Optimizer.profile_hook_step(step)})
