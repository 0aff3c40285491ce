"""A task of the user's own as a workload: any data set, model and loss, through the few methods of `Task`.

What a method raises, or gives that cannot be used, becomes a ConfigError in one line, with what was expected and what was got.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from accumulation_harness.config import ConfigError, Norm, WorkloadConfig, targets
from accumulation_harness.config.declare import MOST_SAMPLES
from accumulation_harness.system import pytree
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.fixed_randomness import FixedRandomness, has_fixed_randomness
from accumulation_harness.workloads.layers import in_format, replace_layers, with_real_parameters
from accumulation_harness.workloads.widening import as_asked, widened

FIELD = "workload.target"
LABELS = ("labels", "label", "targets", "target")  # keys of a mapping that the model does not get
MAX_GROUPS = 32  # Wu & He, arXiv:1803.08494
ENOUGH = 16  # samples of the first batch that are collated one by one
CPU = torch.device("cpu")


class Task(Protocol):
    """What a target gives; `collate`, `forward`, `terms`, `correct`, `metrics` and `fingerprint` may be left out."""

    def model(self, norm: str) -> nn.Module:
        """A fresh float32 model on the CPU, drawn from torch's global generator; `norm` is "as_is" unless swept."""
        ...

    def train(self) -> Sequence[Any]:
        """len() samples, [i] each: any nest of tensors, arrays and numbers."""
        ...

    def held_out(self) -> Sequence[Any]:
        """The same of the samples that are not trained on."""
        ...

    def losses(self, outputs: Any, batch: Any) -> Tensor:
        """[n] each row's loss, summed over its terms."""
        ...


@cache
def _open_task(target: str, arguments: str) -> Task:
    """The task, made once in a process; `arguments` is a JSON object of keyword arguments. ConfigError where it is none."""
    made = targets.load(FIELD, target)
    with targets.expecting(FIELD, target, "a class or function that makes a task with workload.args"):
        task: Task = made(**json.loads(arguments))
    missing = [name for name in ("model", "train", "held_out", "losses") if not callable(getattr(task, name, None))]
    if missing:
        raise ConfigError(
            FIELD, target, f"a task with the methods model, train, held_out and losses; {_kind(task)} has no {missing[0]}"
        )
    return task


class CustomWorkload(Workload):
    """A task's data, model and losses, in one floating format on one device."""

    def __init__(self, config: WorkloadConfig, norm: Norm, *, device: torch.device, dtype: torch.dtype) -> None:
        assert config.target is not None
        self._target, self._norm, self._device, self._dtype = config.target, norm, device, dtype
        self._task = _open_task(config.target, json.dumps(config.args))
        if config.source and config.source != (now := targets.digest_of(self._task.fingerprint())):  # type: ignore[attr-defined]
            raise ConfigError("workload.source", config.source, f"{now}, what fingerprint() says of the data: they were changed")
        self._train, self._held_out = self._sequence("train"), self._sequence("held_out")
        self.num_samples = len(self._train)
        self._collate: Callable[[Any], Any] = getattr(self._task, "collate", default_collate)
        self.collates_anew: bool | None = None if hasattr(self._task, "collate") else False  # not known before the first batch

    @property
    def held_out(self) -> Batch:  # type: ignore[override] # made when it is asked for: it may be large
        """All held-out samples as one batch."""
        return next(self.held_out_batches(len(self._held_out)))

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out samples, `size` at a time; their ids go on after the training set's."""
        for ids in torch.arange(len(self._held_out)).split(size):
            yield self._made("held_out", self._held_out, ids, self.num_samples)

    def make_model(self) -> nn.Module:
        """The task's model, its BatchNorm layers exchanged as `norm` asks."""
        with self.expecting(f'model("{self._norm}") that gives a torch.nn.Module'):
            model = self._task.model(str(self._norm))
        if not isinstance(model, nn.Module):
            raise self.refused(f'model("{self._norm}") that gives a torch.nn.Module, got {_kind(model)}')
        if isinstance(model, torch.jit.ScriptModule):
            raise self.refused("a model whose forwards can be seen, got a scripted one, which takes no hooks")
        if any(is_lazy(p) or p.is_meta for p in model.parameters()):
            raise self.refused("a model whose parameters have their values, got some of a lazy layer or on the device meta")
        model = in_format(model, CPU, torch.float32)
        with self.expecting("a model whose complex parameters have one name each"):
            with_real_parameters(model)
        if self._norm in (Norm.none, Norm.group, Norm.layer):
            _exchange_batch_norm(model, self._norm)
            left = [name or "the model itself" for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
            if left:
                expected = f"as_is or batch: {', '.join(left[:3])} cannot be exchanged"
                raise ConfigError("norm", self._norm, expected)
        if self._norm == Norm.batch and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            raise ConfigError("norm", self._norm, "as_is, group, layer or none: the task's model has no BatchNorm")
        if not any(p.requires_grad for p in model.parameters()):
            raise self.refused("a model with parameters to train, got none that requires gradients")
        return model

    def batch(self, ids: Tensor) -> Batch:
        """The collated samples `ids`."""
        return self._made("train", self._train, ids, 0)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """`forward(model, batch)` of the task; else `model` gets the first part of a tuple, or a mapping without its labels."""
        inputs = batch.inputs
        with self._format(), FixedRandomness() if has_fixed_randomness(model) else nullcontext():
            if hasattr(self._task, "forward"):
                return self._task.forward(model, inputs)
            if isinstance(inputs, Mapping):
                return model(**{key: value for key, value in inputs.items() if key not in LABELS})
            return model(inputs[0] if isinstance(inputs, (list, tuple)) else inputs)

    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """[n] float32 or wider."""
        with self._format():
            losses = self._rows("losses", self._task.losses(outputs, batch.inputs), batch)
        return losses if losses.dtype == torch.float64 else losses.float()

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] int64 of counts, float64 of weights; ones where the task does not say."""
        if not hasattr(self._task, "terms"):
            return torch.ones(len(batch), dtype=torch.int64, device=self._device)
        with self.expecting("terms(batch) that gives a number for each row"):
            told = self._task.terms(batch.inputs)
        terms = self._rows("terms", told, batch)
        if terms.is_complex() or not bool((terms.isfinite() & (terms >= 0)).all()):
            raise self.refused(
                f"terms(batch) that gives numbers from 0 on, got {terms.dtype} from {float(terms.real.min()):g} on"
            )
        return terms.to(self._device, torch.float64 if terms.is_floating_point() else torch.int64)

    def correct(self, outputs: Any, batch: Batch) -> Tensor:
        """[n]; NaN where the task does not say."""
        if not hasattr(self._task, "correct"):
            return torch.full((len(batch),), math.nan)
        with self.expecting("correct(outputs, batch) that gives a number for each row"):
            told = self._task.correct(outputs, batch.inputs)
        return self._rows("correct", told, batch)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """`metrics(model)` of the task, whatever it does with a trained model; none where it has no such method."""
        if not hasattr(self._task, "metrics"):
            return {}
        with self._format(), self.expecting("metrics(model) that gives a number by name"):
            return {str(name): float(value) for name, value in self._task.metrics(model).items()}

    def _format(self) -> AbstractContextManager[None]:
        return widened() if self.widens else nullcontext()

    def _sequence(self, name: str) -> Sequence[Any]:
        with self.expecting(f"{name}() that gives a sequence of samples"):
            made = getattr(self._task, name)()
        if not hasattr(made, "__getitem__") or not hasattr(made, "__len__"):
            raise self.refused(f"{name}() that gives something with len() and [i], got {_kind(made)}")
        with self.expecting(f"{name}() whose len() is a number of samples"):
            size = len(made)
        if not 0 < size <= MOST_SAMPLES:
            raise self.refused(f"{name}() with 1 to {MOST_SAMPLES} samples, got {size}")
        sequence: Sequence[Any] = made
        return sequence

    def _made(self, name: str, samples: Sequence[Any], ids: Tensor, first: int) -> Batch:
        expected = f"{name}() and collate() that give a batch of the samples {_listed(ids)}"
        with self.expecting(expected):
            own = [samples[i] for i in ids.tolist()]
        return self._batch(expected, own, ids + first)

    def _batch(self, expected: str, samples: Sequence[Any], ids: Tensor) -> Batch:
        """A batch of `samples`, of which micro-batches are cut, or collated anew where that gives something else."""
        with as_asked(), self.expecting(expected):
            content = self._content(samples)
            if self.collates_anew is None and len(samples) > 1:
                self.collates_anew = not self._is_cut_by_rows(content, samples)
        if not self.collates_anew:
            return Batch(ids=ids, inputs=content, targets=ids)

        def collated(places: Tensor) -> Batch:
            return self._batch(expected, [samples[k] for k in places.tolist()], ids[places])

        return Batch(ids=ids, inputs=content, targets=ids, collated=collated)

    def _content(self, samples: Sequence[Any]) -> Any:
        return pytree.placed(self._collate(list(samples)), self._device, self._dtype)

    def _is_cut_by_rows(self, content: Any, samples: Sequence[Any]) -> bool:
        """Whether rows are what `collate` makes of the samples one by one: without padding, and no time that comes first."""
        if {num for leaf in pytree.leaves(content) if (num := pytree.num_rows(leaf)) is not None} != {len(samples)}:
            return False
        return all(
            pytree.same(pytree.rows(content, slice(k, k + 1)), self._content([one])) for k, one in enumerate(samples[:ENOUGH])
        )

    def _rows(self, name: str, value: Any, batch: Batch) -> Tensor:
        if not isinstance(value, Tensor) or value.shape != (len(batch),):
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else _kind(value)
            raise self.refused(f"{name}(...) that gives a tensor [n], one number for each of n={len(batch)} rows, got {got}")
        return value

    def refused(self, expected: str) -> ConfigError:
        """The error to raise about what the task has given."""
        return ConfigError(FIELD, self._target, expected)

    def expecting(self, expected: str) -> AbstractContextManager[None]:
        """Inside, what the task's code raises becomes such an error."""
        return targets.expecting(FIELD, self._target, expected)


def _exchange_batch_norm(model: nn.Module, norm: Norm) -> None:
    """Every BatchNorm layer becomes GroupNorm (`layer`: of one group) with its scale and shift, or nothing (`none`), in place.

    Groups: the largest divisor of the channels up to 32 (Wu & He, arXiv:1803.08494).
    """

    def made(layer: _BatchNorm) -> nn.Module:
        if norm == Norm.none:
            return nn.Identity()
        channels = layer.num_features
        groups = 1 if norm == Norm.layer else max(g for g in range(1, MAX_GROUPS + 1) if channels % g == 0)
        group = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            group.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        return group

    replace_layers(model, _BatchNorm, made)


def _kind(value: object) -> str:
    return type(value).__name__


def _listed(ids: Tensor) -> str:
    return ", ".join(map(str, ids.tolist()[:3])) + (", ..." if len(ids) > 3 else "")
