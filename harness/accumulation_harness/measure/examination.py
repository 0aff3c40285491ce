"""What a task of the user's own is, found out before anything is trained: in float64, or in float32 where it has no other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accumulation_harness.config import ConfigError, OptimizerConfig
from accumulation_harness.config.targets import expecting, said
from accumulation_harness.judge.cause import Cause
from accumulation_harness.measure.optimizer_state import with_inner
from accumulation_harness.recipes.determinism import fixed_randomness
from accumulation_harness.recipes.recipe import make_optimizer
from accumulation_harness.recipes.remedies import freeze
from accumulation_harness.referee.oracle import State, mark_carried, restore, snapshot
from accumulation_harness.system import pytree
from accumulation_harness.system.state import moved
from accumulation_harness.system.state import snapshot as everything
from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.custom import CustomWorkload
from accumulation_harness.workloads.fixed_randomness import CONSTANTS, mark_draws
from accumulation_harness.workloads.layers import copied, has_batch_norm, in_format, without_dropout
from accumulation_harness.workloads.widening import Narrow

# Relative: outputs and losses of a row in other company, where it makes no difference, by their format.
SAME = {torch.float64: 1e-9, torch.complex128: 1e-9}
SAME_IN_FLOAT32 = 1e-4


def why_not_float64(workload: CustomWorkload, initial: nn.Module, ids: Tensor, device: torch.device) -> str:
    """Try whether a task computes in float64. Where it narrows its numbers inside, its code is widened (`workload.widens`).

    Args:
        workload: The task's float64 workload.
        initial: Its model.
        ids: [n] int64 samples to try it on.
        device: Where.

    Returns:
        Why it does not; empty where it does.

    Raises:
        ConfigError: The task fails in float32 as well.
    """
    window, why = workload.batch(ids), ""
    model = in_format(copied(initial), device, torch.float64)
    state, trained = snapshot(model), [p for p in model.parameters() if p.requires_grad]
    for workload.widens in (False, True):
        narrow = Narrow()
        try:
            with narrow:
                losses = _tried(workload, model, state, window, 0, graph=True)[1]
                if losses.requires_grad:
                    torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        except ConfigError:
            raise
        except Exception as error:  # whatever the task's code raises
            why = said(error)
            continue
        if not narrow.operations:
            return ""
        why = f"it computes {', '.join(narrow.operations[:3])} in a narrower format"
    return why


def examine(
    workload: CustomWorkload, initial: nn.Module, ids: Tensor, device: torch.device, dtype: torch.dtype, *, micro_batch: int
) -> None:
    """Try the samples `ids` on the workload of format `dtype`.

    Whether rows are coupled is noted in it (`coupling`, `mixes_rows`, ...). Raises ConfigError where the task cannot be judged:
    data that are not the same when read again, losses that are not [n] or not finite, no gradient, random numbers that are not
    dropout's.

    Args:
        workload: The task.
        initial: Its model.
        ids: [n] numbers of samples.
        device: Device of the trial.
        dtype: Floating format of the trial.
        micro_batch: Rows that are tried together, beside halves, to see whether they are coupled.
    """
    window = workload.batch(ids)
    if not pytree.same(window.inputs, workload.batch(ids).inputs):
        raise workload.refused("train() whose samples are the same whenever they are read; they changed between two reads")
    _note_movements(workload, initial, window, device, dtype)
    model = in_format(copied(initial), device, dtype)
    state = snapshot(model)
    with workload.expecting("a model and losses that run on the first window"):
        outputs, losses = _tried(workload, model, state, window, 0, graph=True)
    if not pytree.same(window.inputs, workload.batch(ids).inputs):
        raise workload.refused("a forward and losses that leave the batch as it is; they changed it in place")
    _check_gradient(workload, model, losses)
    workload.num_terms(window)
    workload.correct(outputs, window)
    _try_held_out(workload, model, state, len(window))
    deterministic = without_dropout(model)
    tried = partial(_tried, workload, deterministic, state, window)
    outputs, losses = tried(0)
    if not _same_numbers(tried(0), (outputs, losses)):
        raise workload.refused("forwards that repeat from the same weights, buffers and seed of torch; two of them differ")
    if not _same_numbers(tried(1), (outputs, losses)):
        for one in (initial, deterministic):
            mark_draws(one, one is initial)
        outputs, losses = tried(0)
        if not _same_numbers(tried(1), (outputs, losses)):
            known = ", ".join(name for name in CONSTANTS if not name.endswith("_"))
            raise workload.refused(
                f"random numbers of the model's forward alone, by {known} or dropout; without these two differ"
            )
    workload.smallest_micro_batch = _smallest(workload, deterministic, state, window)
    tried(0)  # what a second forward gives with the buffers that a first one has left
    workload.is_stateful = not _same_numbers(_tried(workload, deterministic, snapshot(deterministic), window, 0)[0], outputs)
    if len(window) >= 4:
        _note_couplings(workload, deterministic, state, window, {len(window) // 2, micro_batch})


def _note_movements(
    workload: CustomWorkload, initial: nn.Module, window: Batch, device: torch.device, dtype: torch.dtype
) -> None:
    """Note what a training forward moves of the model: the attributes that are to be put back, and whether there is anything."""
    model = in_format(copied(initial), device, dtype)
    ignored = {f"model.{name}." for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    before = everything({"model": model})
    with suppress(Exception), fixed_randomness(0, device):  # what it raises is said by the one that tries it
        workload.forward(model, window)
    paths = [path for path in moved(before, everything({"model": model})) if path.rpartition(".")[0] + "." not in ignored]
    workload.moves_state = bool(paths)
    names = (path.removeprefix("model.") for path in paths)
    mark_carried(initial, [name for name in names if type(_attribute(initial, name)) in (bool, int, float, Tensor)])


def _attribute(model: nn.Module, name: str) -> Any:
    """A layer's own attribute that is neither a parameter nor a buffer; None where there is none of that name."""
    layer, _, own = name.rpartition(".")
    return vars(dict(model.named_modules()).get(layer, nn.Identity())).get(own)


def _try_held_out(workload: CustomWorkload, model: nn.Module, state: State, size: int) -> None:
    """What is asked for at the end of a training."""
    expected = "a forward of held_out() under torch.no_grad() (torch.enable_grad() around what needs gradients)"
    with workload.expecting(expected), torch.no_grad():
        model.eval()
        batch = next(workload.held_out_batches(size))
        _tried(workload, model, state, batch, 0)
        workload.num_terms(batch)
        model.train()


def _note_couplings(workload: CustomWorkload, model: nn.Module, state: State, window: Batch, cuts: Collection[int]) -> None:
    """Note what outputs and losses are in another order, or cut into so many rows each, otherwise than in the whole.

    BatchNorm apart: its layers normalise by their running statistics here, whatever their inputs have been made of.
    """
    num, model = len(window), copied(model)
    freeze(model)
    outputs, losses = _tried(workload, model, state, window, 0)
    workload.coupling, workload.mixes_rows = None, False
    for size in cuts:
        edges = [slice(start, start + size) for start in range(0, num, size)]
        sizes = [len(window.ids[edge]) for edge in edges]
        parts = [window.rows(edge) for edge in edges]
        alone = [_tried(workload, model, state, part, 0) for part in parts]
        pools = workload.collates_anew or not all(_is_of_rows(leaf, [num, *sizes]) for leaf in _together(outputs, alone))
        workload.pools_rows |= pools
        if pools:
            apart = torch.cat([own for _, own in alone])
        else:
            cut = [pytree.rows(outputs, edge, of=num) for edge in edges]
            apart = torch.cat([workload.losses(own, part) for own, part in zip(cut, parts, strict=True)])
        if not _near(apart, losses):
            workload.coupling = Cause.non_separable_loss
        if not workload.collates_anew:  # else what the model mixes is in the losses
            joined = pytree.joined([[*pytree.tensors(own)] for own, _ in alone], sizes)
            leaves = ([leaf for leaf in pytree.tensors(of) if leaf.dim()] for of in (joined, outputs))
            workload.mixes_rows |= not _same_numbers(*leaves)
    turned = torch.randperm(num, generator=torch.Generator().manual_seed(0))  # a model may mix a row with its mirror image's
    workload.orders_rows = not _near(_tried(workload, model, state, window.rows(turned), 0)[1], losses[turned])
    if workload.orders_rows:  # which no statistics of the rows does
        workload.coupling, workload.pools_rows, workload.mixes_rows = Cause.non_separable_loss, True, False


def _together(outputs: Any, alone: Sequence[tuple[Any, Tensor]]) -> Iterator[tuple[Any, ...]]:
    """Each leaf of the outputs with those of its halves."""
    return zip(pytree.leaves(outputs), *(pytree.leaves(own) for own, _ in alone), strict=True)


def _is_of_rows(leaf: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether leaves, of the whole and of its halves, have a row for each sample, or are the same in all three.

    An object that holds tensors is cut by nobody but its author.

    Returns:
        True if it can be cut by rows.
    """
    if all(pytree.num_rows(one) == size for one, size in zip(leaf, sizes, strict=True)):
        return True
    first, *others = leaf
    if not isinstance(first, Tensor):
        return not pytree.is_opaque(first)
    return all(first.shape == one.shape and _near(first, one) for one in others)


def try_step(config: OptimizerConfig, initial: nn.Module) -> str:
    """Try a step of an optimizer of the user's, on gradients of the model's shapes.

    Args:
        config: The optimizer's settings.
        initial: The model.

    Returns:
        Why it takes no step in float64; empty where it does.

    Raises:
        ConfigError: It takes none in float32 either.
    """
    if config.target is None:
        return ""
    first, second = (_stepped(config, config.target, initial) for _ in range(2))
    if not all(map(torch.equal, first, second)):
        raise ConfigError(
            "optimizer.target", config.target, "a step() that repeats from the same seed of torch; two of them differ"
        )
    try:
        _stepped(config, config.target, in_format(copied(initial), torch.device("cpu"), torch.float64))
    except ConfigError as error:
        return "its optimizer: " + (str(error).partition("it raised ")[2] or str(error))
    return ""


def _stepped(config: OptimizerConfig, target: str, initial: nn.Module) -> list[Tensor]:
    """The parameters after a step."""
    model, generator = copied(initial), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(config, model.parameters())
    held = {id(p) for one in with_inner(optimizer) for group in one.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        expected = f"an optimizer of all parameters that require gradients; its groups lack {', '.join(left[:3])}"
        raise ConfigError("optimizer.target", target, expected)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) if p.requires_grad else None
    with fixed_randomness(0, torch.device("cpu")), expecting("optimizer.target", target, "an optimizer whose step() runs"):
        optimizer.step()
    own: list[Tensor] = list(model.parameters())
    if not all(bool(p.isfinite().all()) for p in own):
        raise ConfigError("optimizer.target", target, "an optimizer whose step() gives finite weights, got NaN or infinity")
    if all(map(torch.equal, own, initial.parameters())) and not any(one.state for one in with_inner(optimizer)):
        raise ConfigError("optimizer.target", target, "an optimizer whose step() moves weights or keeps state; it did nothing")
    return own


def _smallest(workload: CustomWorkload, model: nn.Module, state: State, window: Batch) -> int:
    """2 where BatchNorm refuses a single row, else 1."""
    if has_batch_norm(model):
        try:
            _tried(workload, model, state, window.rows(slice(0, 1)), 0)
        except ValueError:
            return 2
    return 1


def _check_gradient(workload: CustomWorkload, model: nn.Module, losses: Tensor) -> None:
    if not bool(torch.isfinite(losses).all()):
        shown = ", ".join(f"{value:g}" for value in losses.detach().flatten()[:4].tolist())
        raise workload.refused(f"finite losses at the initial weights, got {shown}")
    if not losses.requires_grad:
        raise workload.refused("losses(outputs, batch) that depend on the model's parameters, got values without a gradient")
    trained = [p for p in model.parameters() if p.requires_grad]
    with workload.expecting("a model that torch.autograd.grad differentiates"):
        each = torch.autograd.grad(losses.sum(), trained, allow_unused=True, retain_graph=True)
        losses.sum().backward()
    found = [one for one in each if one is not None]
    if any(one.is_sparse for one in found):
        raise workload.refused("dense gradients, got sparse ones (of an embedding with sparse=True), which cannot be clipped")
    if not any(bool(one.any()) for one in found):
        raise workload.refused("losses with a gradient at the initial weights, got zeros for every parameter")
    if not all(bool(torch.isfinite(one).all()) for one in found):
        raise workload.refused("a finite gradient at the initial weights, got NaN or infinity")
    named = {p: name for name, p in model.named_parameters()}
    for p, one in zip(trained, each, strict=True):
        if not _near(*(torch.zeros_like(p) if gradient is None else gradient for gradient in (one, p.grad))):
            expected = "a model to which torch.autograd.grad and backward() give the same gradients"
            raise workload.refused(
                f"{expected}; those of {named[p]} differ (as under a reentrant checkpoint, or a hook that takes them)"
            )


def _tried(
    workload: CustomWorkload, model: nn.Module, state: State, batch: Batch, seed: int, *, graph: bool = False
) -> tuple[Any, Tensor]:
    """Outputs and losses of a forward from `state`, whatever earlier forwards have done to the model's buffers.

    Without their graph, which keeps all activations, unless it is asked for.

    Returns:
        The outputs, and [n] losses.
    """
    restore(model, state)
    with fixed_randomness(seed, next(model.parameters()).device):
        outputs = workload.forward(model, batch)
        losses = workload.losses(outputs, batch)
    if graph:
        return outputs, losses
    return pytree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs), losses.detach()


def _same_numbers(a: Any, b: Any) -> bool:
    """Whether the floating tensors of two nests agree within rounding, where they have the same shapes."""
    pairs = zip(pytree.tensors(a), pytree.tensors(b), strict=False)
    return all(_near(x, y) for x, y in pairs if x.is_floating_point() and x.shape == y.shape)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(a - b) <= SAME.get(b.dtype, SAME_IN_FLOAT32) * torch.linalg.vector_norm(b))
