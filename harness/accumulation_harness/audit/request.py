"""What an audit is asked to do and to write, checked before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.terminal import closest

Format = Literal["text", "json", "markdown", "junit", "sarif", "issue", "svg"]
ENDINGS: dict[str, Format] = {".sarif": "sarif", ".xml": "junit", ".md": "markdown", ".json": "json", ".svg": "svg"}
MAX_STEPS = 200  # optimizer steps of a run; a handful says as much
FEW_STEPS = 8  # that do where they take long, as with the evaluations of real training; all these windows are looked into
SIZES = ("batch_size", "accumulation_steps")
OFFERED = ("dtype", "order_seed", "hand", "weights")  # keyword parameters that a training function may have


def checked(
    train: Callable[..., Any],
    reference: Callable[..., Any] | None,
    batch_size: int,
    accumulation_steps: int | Sequence[int],
    *,
    processes: int,
    max_steps: int | None,
) -> list[int]:
    """The arms, as `arms_of` the numbers of accumulation steps.

    Args:
        train: The audited function.
        reference: A plain loop to compare with, or None.
        batch_size: Rows of a whole batch.
        accumulation_steps: Numbers of micro-batches.
        processes: Ranks that are started.
        max_steps: Optimizer steps of a run, or None.

    Returns:
        The numbers of micro-batches that are compared with the reference.

    Raises:
        ValueError: An argument cannot be run; it is named with its value.
    """
    _check_function("train", train)
    if reference is not None:
        _check_function("reference", reference)
    for name, value in (
        ("batch_size", batch_size),
        ("processes", processes),
        ("max_steps", MAX_STEPS if max_steps is None else max_steps),
    ):
        if not _is_count(value):
            raise ValueError(f"expected {name} as a whole number of 1 or more, got {value!r}")
    steps = [accumulation_steps] if isinstance(accumulation_steps, int) else accumulation_steps
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Sequence):
        raise ValueError(f"expected accumulation_steps as whole numbers, as (4, 16), got {accumulation_steps!r}")
    if not steps:
        raise ValueError("expected at least one number of accumulation_steps, got none")
    for n in steps:
        if not _is_count(n) or batch_size % n:
            raise ValueError(f"expected accumulation_steps as whole numbers that divide batch_size={batch_size}, got {n!r}")
    return arms_of(sorted(set(steps)), independent=reference is not None)


def causes_of(names: Collection[str]) -> frozenset[Cause]:
    """The causes of these names.

    Args:
        names: Names of causes.

    Returns:
        The causes.

    Raises:
        ValueError: A name is no cause, or a text stands in place of a set.
    """
    if isinstance(names, str):
        raise ValueError(f"expected allow as a set of causes, as {{'stochastic_layers'}}, got {names!r}")
    for name in names:
        if name not in set(Cause):
            close = closest(str(name), list(Cause)) or next(iter(Cause))
            raise ValueError(f"expected allow to name causes, as {close}, got {name!r}")
    return frozenset(map(Cause, names))


def arms_of(steps: Sequence[int], *, independent: bool) -> list[int]:
    """List the N that are compared with the reference: N=1 as well if the reference is another function.

    Args:
        steps: The numbers that were asked for.
        independent: Whether the reference is another function.

    Returns:
        The numbers, 1 first where it is compared.

    Raises:
        ValueError: Nothing is left to compare.
    """
    arms = ([1] if independent else []) + [n for n in steps if n != 1]
    if not arms:
        raise ValueError("expected accumulation_steps above 1, or a reference to compare N=1 with, got 1 alone")
    return arms


def format_of(path: Path) -> Format:
    """The format that the path's ending names.

    Args:
        path: File that a report is saved to.

    Returns:
        The format.

    Raises:
        ValueError: The ending names no format.
    """
    if path.suffix not in ENDINGS:
        *others, last = ENDINGS
        raise ValueError(f"expected a path ending in {', '.join(others)} or {last}, got {path}")
    return ENDINGS[path.suffix]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_function(name: str, function: Any) -> None:
    """That it can be called with the two numbers."""
    if not callable(function):
        raise ValueError(f"expected {name} to be a function of (batch_size, accumulation_steps), got {function!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: called by position, and told then
        return
    if not takes_sizes(signature):
        raise ValueError(f"expected {name}(batch_size, accumulation_steps), got {name}{signature}")


def takes_sizes(signature: inspect.Signature) -> bool:
    """Whether a function can be called with a micro-batch size and their number, and with nothing that is not offered.

    Args:
        signature: That of the audited function.

    Returns:
        True where both numbers can be handed over by position.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [p for p in signature.parameters.values() if p.name not in OFFERED]
    is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)
    required = [p for p in own if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    named = all(size in signature.parameters for size in SIZES)
    return len(required) <= len(SIZES) and (named or is_open or sum(p.kind in positional for p in own) >= len(SIZES))
