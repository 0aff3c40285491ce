"""What of a parameter is here, and which ranks have the rest, as DDP, FSDP1, FSDP2 and the meshes of tensors declare it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Held(NamedTuple):
    """A parameter on this rank."""

    elements: int  # of the whole
    ranks: tuple[int, ...] = ()  # that differentiate rows of their own and have replicas or shards of it; none declared
    shards: int = 1  # so many of them, one after the other, have a whole
    dim: int = 0  # along which it is cut
    start: int = 0  # of what is here, along it
    here: int = -1  # elements of it; -1: it is not cut up among such ranks
    summed: tuple[int, ...] = ()  # ranks whose gradients are added up
    placements: tuple[Any, ...] = ()  # on its mesh

    def of_parts(self, p: Any, gradient: Any) -> Held:
        """Where a rank gives a part of its gradient (sequence parallelism), those of the other parts are added as well."""
        inside = [slice(None) if placement.is_partial() else place for placement, place in
                  zip(gradient.placements, gradient.device_mesh.get_coordinate(), strict=True)]  # fmt: skip
        return self._replace(summed=tuple(p.device_mesh.mesh[(..., *inside)].flatten().tolist()))


def cut(gradient: Any, placements: Sequence[Any]) -> Any:
    """Cut a gradient that is whole on several ranks as its parameter is, which asks no rank for anything.

    Args:
        gradient: A plain one, or a DTensor on the mesh of its parameter or on the last dimensions of it.
        placements: Of the parameter.

    Returns:
        The gradient, or its part.
    """
    own = getattr(gradient, "placements", ())
    pairs = [*zip(own, placements[len(placements) - len(own) :], strict=True)]
    if all(one == of or not one.is_replicate() for one, of in pairs):
        return gradient
    return gradient.redistribute(placements=[of if one.is_replicate() else one for one, of in pairs])


class Shards:
    """Of a model, as its wrappers are when a watch begins."""

    def __init__(self, model: nn.Module) -> None:
        own = {id(module) for module in model.modules()}
        flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", DistributedDataParallel)
        kinds: Any = DistributedDataParallel, flat
        objects = gc.get_objects() if distributed.is_available() and distributed.is_initialized() else []
        found: list[Any] = [item for item in objects if issubclass(type(item), kinds)]
        around = [item for item in found if id(item) in own or id(item.module) in own]
        self._replicas = next((_members(one.process_group) for one in around if isinstance(one, DistributedDataParallel)), ())
        self.flat_wrappers = [one for one in around if not isinstance(one, DistributedDataParallel) and one._handle is not None]
        self.flats: list[Any] = [one._handle.flat_param for one in self.flat_wrappers]
        self._by_mesh = any(is_sharded(module) for module in model.modules())

    def held(self, p: Any) -> Held:
        """One of its parameters, plain, sharded or flat."""
        elements = int(getattr(p, "ds_numel", p.numel()))  # of a DTensor, or in DeepSpeed's ZeRO-3: of all its shards
        for wrapper, flat in zip(self.flat_wrappers, self.flats, strict=True):
            if p is flat:
                return _of_flat(wrapper, flat)
        placements = tuple(getattr(p, "placements", ()))
        if self._by_mesh and placements:
            return _of_mesh(p, elements)._replace(placements=placements)
        ranks = () if self._by_mesh else self._replicas
        return Held(elements, ranks, summed=ranks, placements=placements)

    def flattened(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Those of an optimizer, with flat ones in the place of their views."""
        if not self.flats:
            return [*parameters]
        of = {id(view): flat for flat in self.flats for view in (flat, *(flat._params or ()))}
        return list({id(one): one for one in (of.get(id(p), p) for p in parameters)}.values())

    def everyone(self, parameters: Iterable[Any]) -> tuple[int, ...]:
        """All ranks with a part in the gradients of these; none where nobody is said to have one."""
        shared = [(p, ranks) for p in parameters if (ranks := self.held(p).ranks)]
        on_meshes = [p.device_mesh.mesh.flatten().tolist() for p, _ in shared if hasattr(p, "placements")]
        return tuple(sorted({rank for ranks in (*on_meshes, *(ranks for _, ranks in shared)) for rank in ranks}))


def is_sharded(module: nn.Module) -> bool:
    """Decide whether `fully_shard` (FSDP2) was applied to a module.

    Args:
        module: Any module.

    Returns:
        True if it was.
    """
    return hasattr(module, "set_requires_gradient_sync") and hasattr(module, "unshard")


def _members(group: Any) -> tuple[int, ...]:
    return tuple(distributed.get_process_group_ranks(group))


def _of_flat(wrapper: Any, flat: Any) -> Held:
    """FSDP1 cuts many parameters in one, padded; over nodes there may be replicas of it."""
    ranks, here = _members(wrapper.process_group), flat._sharded_size.numel()
    if not wrapper._handle.uses_sharded_strategy:
        return Held(here, ranks, summed=ranks)
    own, nodes = distributed.get_rank(), getattr(wrapper, "_inter_node_pg", None)
    replicas = (own,) if nodes is None else _members(nodes)
    every = tuple(other - own + rank for other in replicas for rank in ranks)
    return Held(here * len(ranks), every, len(ranks), 0, here * ranks.index(own), here, every)


def _of_mesh(p: Any, elements: int) -> Held:
    """FSDP2 cuts along the first dimension that does, before which are replicas; others cut behind it (tensors, experts)."""
    dims = next((dim for dim, placement in enumerate(p.placements, start=1) if hasattr(placement, "dim")), 0)
    if not dims:  # one that it has left out
        return Held(elements)
    parts = list(zip(p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate(), strict=True))
    (placement, number, rank), inside = parts[dims - 1], parts[dims:]
    size = p.shape[placement.dim]
    for other, of, place in inside:
        if getattr(other, "dim", None) == placement.dim:
            size = _slice(size, of, place)[1]
    mesh = p.device_mesh.mesh[(..., *(place for *_, place in inside))]
    ranks, local = tuple(mesh.flatten().tolist()), p.to_local()
    return Held(elements, ranks, mesh.shape[-1], placement.dim, _slice(size, number, rank)[0], local.numel(), ranks)


def _slice(size: int, of: int, rank: int) -> tuple[int, int]:
    """Where it begins, and how long it is, as `torch.chunk` cuts."""
    each = -(-size // of)
    start = min(rank * each, size)
    return start, min(each, size - start)
