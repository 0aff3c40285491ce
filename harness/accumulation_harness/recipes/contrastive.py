"""What is done about in-batch negatives under accumulation: each a function from a right recipe to another, and a named arm.

`grad_cache` is the full batch, at two forwards of each sample. The banks are other computations, which see more negatives than a
micro-batch has. `temperature_repeated` is a mistake that released trainers make.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from accumulation_harness.config import ConfigError
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.determinism import random_state, set_random_state
from accumulation_harness.recipes.recipe import Arm, Recipe, end_window, run
from accumulation_harness.system import pytree
from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.contrastive import Representations

Transform = Callable[[Recipe], Recipe]
LARGEST_BANK = 2**20  # pairs: every score with each of them is computed at every micro-batch
DECAY = 0.99  # of the momentum encoder, at each optimizer step; He et al. (arXiv:1911.05722) use 0.999 over 200 epochs


def grad_cache(recipe: Recipe) -> Recipe:
    """Compute the window's loss over representations without graph, and send its gradient back through a second forward.

    Gao et al. 2021, arXiv:2101.06983. Both forwards of a part draw the same random numbers. Exact for every loss of the
    outputs.

    Args:
        recipe: Plain accumulation.

    Returns:
        GradCache.
    """
    return dataclasses.replace(recipe, loop=_cached(same_draws=True))


def grad_cache_other_draws(recipe: Recipe) -> Recipe:
    """Wrong where there is dropout: the second forward draws other masks than the one whose outputs the gradient is of.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, loop=_cached(same_draws=False))


def temperature_repeated(recipe: Recipe) -> Recipe:
    """Plant the fault of a temperature that has its gradient once for each part.

    The whole window's loss is differentiated for every part, whose rows alone have a graph: the towers' gradients are exact and
    the temperature's is N times too large (open_clip's `accum_freq`).

    Args:
        recipe: Plain accumulation.

    Returns:
        The wrong method.
    """
    return dataclasses.replace(recipe, loop=_cached(same_draws=False, once=False))


def _cached(*, same_draws: bool, once: bool = True) -> Callable[[Arm, Batch], Tensor]:
    """GradCache; `once`: the gradient of what has no rows, a temperature, goes back for the first part alone."""

    def loop(arm: Arm, window: Batch) -> Tensor:
        parts, whole = _parts(arm, window)
        drawn, held = [], []
        with torch.no_grad():
            for position, part in enumerate(parts):
                drawn.append(random_state(arm.device))
                held.append(_forward(arm, part, position))
        after = random_state(arm.device)
        outputs = pytree.map_leaves(_with_gradient, pytree.joined(held))
        leaves = [leaf for leaf in pytree.tensors(outputs) if leaf.is_floating_point()]
        loss = _objective(arm, outputs, whole)
        arm.memory["held"] = leaves
        slopes = torch.autograd.grad(arm.scaler.scale(loss), leaves, allow_unused=True, materialize_grads=True)
        del held, outputs
        arm.memory["held"] = slopes  # the graph of the loss, and the representations, are gone
        run(arm.recipe.after_backward, arm)
        edges = list(pairwise(accumulate((len(part) for part in parts), initial=0)))
        for position, (part, edge, state) in enumerate(zip(parts, edges, drawn, strict=True)):
            if same_draws:
                set_random_state(state, arm.device)
            again = [leaf for leaf in pytree.tensors(_forward(arm, part, position)) if leaf.is_floating_point()]
            _backward(again, slopes, slice(*edge), with_whole=position == 0 or not once)
            run(arm.recipe.after_backward, arm)
        if same_draws:
            set_random_state(after, arm.device)
        arm.memory["held"] = ()
        _add_penalty(arm)
        return _end_window(arm, window, loss)

    return loop


def _with_gradient(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _backward(outputs: Sequence[Tensor], slopes: Sequence[Tensor], rows: slice, *, with_whole: bool) -> None:
    """Pass the window's gradient with respect to its outputs back through those of `rows`, and of what has no rows."""
    going = [
        (output, slope[rows] if output.dim() else slope)
        for output, slope in zip(outputs, slopes, strict=True)
        if output.requires_grad and (output.dim() or with_whole)
    ]
    torch.autograd.backward([output for output, _ in going], [slope for _, slope in going])


@dataclasses.dataclass(frozen=True)
class Bank:
    """Past representations without gradient, first in, first out (ContAccum, Kim et al. 2024, arXiv:2406.12356).

    With `queries` too, the scores of a micro-batch are [b + M, b + M], and the loss is a mean over all its rows.
    """

    size: int  # M, pairs
    has_queries: bool  # one-sided without them: more negatives for queries, no more for passages
    has_momentum: bool = False  # entries by an exponential moving average of the towers (MoCo, arXiv:1911.05722)
    since: int = 0  # the window from which on the loss has the entries; they are collected from the first one on

    def loss(self, arm: Arm, own: Representations, part: Batch) -> Tensor:
        """The mean loss over the rows of the micro-batch and, with two banks, of the entries: there are none at first."""
        kept: Representations | None = arm.memory.get("bank") if arm.windows >= self.since else None
        if kept is not None:
            queries = torch.cat([own.queries, kept.queries]) if self.has_queries else own.queries
            own = own._replace(queries=queries, passages=torch.cat([own.passages, kept.passages]))
        return arm.workload.losses(own, part).mean()

    def keep(self, arm: Arm, own: Representations, part: Batch) -> None:
        """Add a micro-batch's representations, and drop the oldest beyond M."""
        if self.has_momentum:
            own = self._by_momentum(arm, part)
        kept = [*([arm.memory["bank"]] if "bank" in arm.memory else []), own]
        queries, passages = (torch.cat([one[k].detach() for one in kept])[-self.size :] for k in range(2))
        arm.memory["bank"] = Representations(queries if self.has_queries else queries[:0], passages, own.log_scale.detach())

    def _by_momentum(self, arm: Arm, part: Batch) -> Representations:
        """By the moving average of the towers, which moves at the start of each window."""
        if "average" not in arm.memory:
            arm.memory["average"] = copy.deepcopy(arm.model).requires_grad_(False)
        average = arm.memory["average"]
        with torch.no_grad(), precision.autocast(arm.precision, arm.device):
            if arm.position == 0:
                for old, new in zip(average.parameters(), arm.model.parameters(), strict=True):
                    old.lerp_(new, 1 - DECAY)
            own: Representations = arm.workload.forward(average, part)
        return own


def _banked(bank: Bank) -> Transform:
    """Accumulation whose micro-batches find their negatives in a bank as well; the bank outlives windows."""

    def loop(arm: Arm, window: Batch) -> Tensor:
        losses = []
        for position, (part, _) in enumerate(arm.micro_batches(window)):
            own = _forward(arm, part, position)
            if not isinstance(own, Representations):
                raise ConfigError("methods", "a memory bank", f"outputs that are Representations, got {type(own).__name__}")
            with precision.autocast(arm.precision, arm.device):
                loss = bank.loss(arm, own, part) * (len(part) / len(window))
            arm.scaler.scale(loss).backward()
            bank.keep(arm, own, part)
            run(arm.recipe.after_backward, arm)
            losses.append(loss.detach())
        _add_penalty(arm)
        return _end_window(arm, window, torch.stack(losses).sum())

    return lambda recipe: dataclasses.replace(recipe, loop=loop)


def _parts(arm: Arm, window: Batch) -> tuple[list[Batch], Batch]:
    """The window's micro-batches, and all of it in their order, with what its loss takes from all of its samples."""
    parts = [part for part, _ in arm.micro_batches(window)]
    return parts, arm.workload.prepared(window.in_order(torch.cat([part.ids for part in parts])))


def _forward(arm: Arm, part: Batch, position: int) -> Any:
    arm.position = position
    run(arm.recipe.before_micro_batch, arm)
    with precision.autocast(arm.precision, arm.device):
        return arm.recipe.forward(arm, part)


def _objective(arm: Arm, outputs: Any, window: Batch) -> Tensor:
    """The window's mean loss over its terms, without the penalty."""
    with precision.autocast(arm.precision, arm.device):
        return arm.workload.losses(outputs, window).sum() / arm.workload.num_terms(window).sum()


def _add_penalty(arm: Arm) -> None:
    """Add the penalty's gradient, once for the window; the loss that is reported has it too."""
    if arm.workload.penalty:
        penalty = arm.workload.auxiliary(dict(arm.model.named_parameters()))
        arm.memory["penalty"] = penalty.detach()
        arm.scaler.scale(penalty).backward()


def _end_window(arm: Arm, window: Batch, loss: Tensor) -> Tensor:
    end_window(arm, window)
    penalty: Tensor | float = arm.memory.pop("penalty", 0.0)
    return loss.detach().double() + penalty


EXACT: dict[str, Transform] = {"grad_cache": grad_cache}
WRONG: dict[str, Transform] = {
    "grad_cache_other_draws": grad_cache_other_draws,
    "temperature_repeated": temperature_repeated,
}
BANKS = {"dual_bank": Bank(0, True), "passage_bank": Bank(0, False), "momentum_bank": Bank(0, True, has_momentum=True)}


def named(name: str) -> Transform:
    """Look up a method of contrastive training; see `bank_named` for those with a bank.

    Args:
        name: `gradcache`, or `dual_bank@128`, say.

    Returns:
        The transform from plain accumulation to the method.

    Raises:
        ConfigError: There is no such method, or its bank is empty or larger than `LARGEST_BANK`.
    """
    bank = bank_named(name)
    if bank is not None and 0 < bank.size <= LARGEST_BANK:
        return _banked(bank)
    if name in EXACT | WRONG:
        return (EXACT | WRONG)[name]
    known = ", ".join([*EXACT, *WRONG, *(f"{kind}@SIZE" for kind in BANKS)])
    raise ConfigError("methods", name, f"one of {known}, with a SIZE from 1 to {LARGEST_BANK}, or SIZE+WINDOW")


def bank_named(name: str) -> Bank | None:
    """Read the bank out of a method's name.

    Args:
        name: `dual_bank@128`, or `dual_bank@128+264` whose use begins with window 264.

    Returns:
        The bank, its size in entries; None for a method without one.
    """
    found = re.fullmatch(r"(\w+)@([0-9]+)(?:\+([0-9]+))?", name)
    if found is None or found[1] not in BANKS:
        return None
    return dataclasses.replace(BANKS[found[1]], size=int(found[2]), since=int(found[3] or 0))
