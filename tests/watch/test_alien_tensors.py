"""Runs in whose process there are tensors that the watch does not know: a compiler's, subclasses, and such without numbers."""

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from accumulation_harness.judge.cause import Cause
from tests.audit.asked import named
from tests.audit.loops import frame
from tests.watch.loops import Loop, data, network, right, watched_and_alone
from tests.watch.test_session import Average


def compiled(model, backend, **options):
    whole = torch.compile(model, backend=backend, **options)
    return Loop(model=model, loss=lambda _, x, y, rows: right(whole, x, y, rows))


def compiled_and_handed_over(model, backend):
    return Loop(model=torch.compile(model, backend=backend))


def compiled_block(model, backend):
    model[0].compile(backend=backend)
    return Loop(model=model)


def compiled_loss(model, backend):
    return Loop(model=model, loss=torch.compile(right, backend=backend))


COMPILED = [compiled, compiled_and_handed_over, compiled_block, compiled_loss, partial(compiled, dynamic=True)]


def fresh(kind, backend):
    torch.compiler.reset()
    return kind(network(), backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.slow
def test_a_compiled_model_is_watched(kind, backend):
    report = watched_and_alone(lambda: fresh(kind, backend))
    assert report.causes == () and report.checked["sums"] == report.windows == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_a_model_is_watched_that_inductor_has_compiled():
    report = watched_and_alone(lambda: fresh(compiled, "inductor"))
    assert report.causes == () and report.checked["sums"] == 6


@pytest.mark.parametrize("wrong", [True, False])
def test_an_average_by_hand_is_found_beside_a_compiled_model_and_a_right_one_is_equivalent(wrong):
    def make():
        loop = fresh(compiled, "aot_eager")
        loop.after_backward = Average(0.1).update if wrong else loop.after_backward
        return loop

    report = watched_and_alone(make)
    assert report.causes == ((Cause.ema_per_micro_batch,) if wrong else ())
    assert report.checked["sums"] == report.windows == 6


# -- tensors that only lie in the process, with the shape of a weight ---------------------------------------------------


class Hostile(Tensor):
    """A subclass on which every operation raises, and every look at an attribute."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(str(func))


class Wrapper(Tensor):
    """A subclass without memory of its own, which knows no operation but a detached copy."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(str(func))
        return tree_map(lambda item: item, args[0])


def fake(like):
    with FakeTensorMode():
        return torch.empty(like.shape)


def given_back(like):
    """What FSDP leaves of a weight between forwards."""
    empty = like.clone()
    empty.untyped_storage().resize_(0)
    return empty


def of_a_transform(like):
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.square().sum())[1])(like)
    return kept[0]


ALIENS = {
    "hostile subclass": lambda like: like.clone().as_subclass(Hostile),
    "hostile parameter": lambda like: nn.Parameter(like.clone()).as_subclass(Hostile),
    "wrapper": Wrapper,
    "fake": fake,
    "meta": lambda like: torch.empty_like(like, device="meta"),
    "sparse": lambda like: like.to_sparse(),
    "csr": lambda like: like.to_sparse_csr(),
    "nested": lambda like: torch.nested.nested_tensor(list(like)),
    "jagged": lambda like: torch.nested.nested_tensor(list(like), layout=torch.jagged),
    "given back": given_back,
    "of a transform": of_a_transform,
    "quantized": lambda like: torch.quantize_per_tensor(like, 0.1, 0, torch.qint8),
    "functional": torch._to_functional_tensor,
    "lazy": lambda like: nn.parameter.UninitializedParameter(),
    "mkldnn": lambda like: like.to_mkldnn(),
}


def made(kind, like):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PyTorch calls a prototype
        return ALIENS[kind](like)


def held(like):
    """All of these, of every shape, alone and in a list, a tuple and a dict each: in no way part of a training."""
    aliens = [[made(kind, weight) for weight in like] for kind in ALIENS]
    return [*aliens, *map(tuple, aliens), *(dict(enumerate(alien)) for alien in aliens)]


def matrices(model):
    return [p.detach() for p in model.parameters() if p.ndim == 2]


def test_a_watch_passes_by_tensors_that_it_does_not_know():
    around = held(matrices(network()))
    assert watched_and_alone(Loop).verdict == "equivalent" and around


def with_state(depth):
    """An optimizer whose state holds such tensors, so many containers below a parameter's own entry."""
    loop = Loop()
    for p in loop.model.parameters():
        for kind in ALIENS if p.ndim == 2 else ():
            inner = made(kind, p.detach())
            for _ in range(depth):
                inner = {"inner": [inner]}
            loop.optimizer.state[p][kind] = inner
    return loop


@pytest.mark.parametrize("depth", [0, 2])
def test_a_watch_passes_by_an_optimizer_state_that_it_does_not_know(depth):
    report = watched_and_alone(lambda: with_state(depth))
    assert report.causes == () and report.checked["sums"] == 6


# -- parameters ---------------------------------------------------------------------------------------------------------


class Logged(Tensor):
    """A subclass that works, and notes every function that is called on it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """A parameter that has a name, and behaves as all do."""


class Scaled(nn.Sequential):
    """A network with a weight of any kind beside it."""

    def __init__(self, weight):
        super().__init__(*network())
        self.register_parameter("scale", None)
        self._parameters["scale"] = weight

    def forward(self, x):
        used = self.scale if type(self.scale) in (Logged, Named) else torch.ones(())
        return super().forward(x) * used.as_subclass(Tensor)


def leaf(kind):
    return torch.ones(1).as_subclass(kind).requires_grad_()


PARAMETERS = {
    "adds nothing": (lambda: Named(torch.ones(1)), "equivalent"),
    "logged": (lambda: leaf(Logged), "inconclusive"),
    "wrapper": (lambda: Wrapper(torch.ones(1)), "inconclusive"),
    "fake": (lambda: fake(torch.ones(1)), "inconclusive"),
    "meta": (lambda: nn.Parameter(torch.ones(1, device="meta")), "inconclusive"),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_only_plain_parameters_are_looked_at(kind):
    make, said = PARAMETERS[kind]
    report = watched_and_alone(lambda: Loop(model=Scaled(make())))
    assert (report.verdict, report.causes) == (said, ()) and report.checked["sums"] == 6, str(report)
    assert any("no plain tensors" in line for line in report.reasons) == (said == "inconclusive")
    assert not any("the watch ended" in line for line in report.reasons)


def test_nothing_is_called_on_a_subclass_that_the_run_does_not_call():
    calls = []
    for watches in (True, False):
        loop = Loop(model=Scaled(leaf(Logged)))
        Logged.calls.clear()
        loop.watched() if watches else loop.run()
        calls.append(list(Logged.calls))
    assert calls[0] == calls[1] != []


class Spectral(nn.Sequential):
    """A network with complex weights."""

    def __init__(self):
        super().__init__(*network())
        self.filter = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=x.shape[1]))


def clear_imaginary(loop):
    if loop.k and loop.model.filter.grad is not None:
        loop.model.filter.grad.imag.zero_()


@pytest.mark.filterwarnings("error")
def test_of_complex_weights_both_parts_are_looked_at():
    assert watched_and_alone(lambda: Loop(model=Spectral())).verdict == "equivalent"
    report = Loop(model=Spectral(), before_backward=clear_imaginary).watched()
    assert report.verdict == "inconclusive" and "the gradient is changed" in report.reasons[0], str(report)


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_loss_function_that_a_mode_calls_again_is_one(device):
    torch.set_default_device(device)
    try:
        assert Loop().watched().verdict == "equivalent"
    finally:
        torch.set_default_device(None)


# -- the audit ----------------------------------------------------------------------------------------------------------


def test_an_audit_passes_by_tensors_that_it_does_not_know():
    def train(batch_size, accumulation_steps):
        model = network()
        at = frame.At(batch_size, accumulation_steps, model, frame.sgd(model))
        for p in model.parameters():
            at.optimizer.state[p] = {kind: made(kind, p.detach()) for kind in ALIENS if p.ndim == 2}
        around = held(matrices(model))
        x, y = data()
        for window, parts in at.windows(torch.arange(48).split):
            for rows in parts:
                right(model, x[rows], y[rows], len(window)).backward()
        assert around

    named(train, accumulation_steps=(2,))
