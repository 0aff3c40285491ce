"""Faults inside a module, which no weights of the micro-batches explain, are placed in that module, and in none beside it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accumulation_harness.audit import audit
from tests.audit.loops import unusual_loops
from tests.audit.loops.frame import At, sgd
from tests.slow import few

B, STEPS, WIDTH, LENGTH, VOCABULARY = 12, 3, 8, 5, 11
PATHS = ("embed", "blocks.0.mixer", "blocks.1.norm", "blocks.1.mlp.0", "blocks.2")


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.norm = Mixer(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x):
        x = x + self.mixer(x)
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


# -- what a forward may do wrong: (forward, state that lasts) -> another forward ----------------------------------------------


def keeps_a_mean(forward, state):
    def wrong(x):
        y = forward(x)
        state["mean"], before = y.detach().mean(), state.get("mean", 0)
        return y + 0.3 * before

    return wrong


def swaps_rows(forward, state):
    return lambda x: forward(x) if len(x) == B else forward(x).roll(1, 0)


def rounds(forward, state):
    return lambda x: forward(x) if len(x) == B else (y := forward(x)).bfloat16().to(y.dtype)


def gives_another_slope(forward, state):
    return lambda x: CentredSlope.apply(forward(x))


class CentredSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, slope):
        return slope - slope.mean(0, keepdim=True)


FAULTS = (
    keeps_a_mean,
    swaps_rows,
    rounds,
    gives_another_slope,
)


def training(make, data, loss):
    """A right loop; `loss(model, rows)` is a mean."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = make()
        for _, parts in At(batch_size, accumulation_steps, model, sgd(model)).windows(data.split):
            for rows in parts:
                (loss(model, rows) / accumulation_steps).backward()

    return train


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


TEXT = torch.randint(VOCABULARY, (STEPS * B, LENGTH), generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(STEPS * B, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


def places(train):
    """Where the audit puts what it has found; each with its finding's cause."""
    report = audit(train, batch_size=B, accumulation_steps=[3])
    assert report.verdict == "different"
    return [(str(f.evidence["place"]), f.cause) for arm in report.results for f in arm.findings if "place" in f.evidence]


def planted(fault, path):
    def make():
        model = Transformer()
        module = model.get_submodule(path)
        module.forward = fault(module.forward, {})
        return model

    return training(make, TEXT, next_token)


ALL = [(fault, path) for fault in FAULTS for path in PATHS]
FEW = [(swaps_rows, "blocks.1.norm"), (gives_another_slope, "blocks.1.norm")]


@pytest.mark.parametrize(
    ("fault", "path"),
    few(FEW, ALL),
)
def test_a_fault_is_placed_in_its_module(fault, path):
    ((place, _),) = places(planted(fault, path))
    assert f"`{path}`" in place and (fault is gives_another_slope) == ("of `" in place and "forward" not in place), place
    if "operation" in place:
        assert "test_place.py" in place or "CentredSlopeBackward" in place, place


# -- layouts, and what is no module's ----------------------------------------------------------------------------------------


class Neighbours(nn.Module):
    def forward(self, x):
        return x - 0.5 * x.mean(0, keepdim=True)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden, mask=None):
        return {"hidden": Neighbours()(self.linear(hidden)), "length": LENGTH}


class Twice(nn.Module):
    """Computed again for the backward, with another result there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        again = torch._C._current_graph_task_id() >= 0
        return torch.tanh(self.linear(x) * (1.3 if again and len(x) < B else 1))


def rounded_if_few(middle, x):
    """To bfloat16: the floor is that of the whole batch."""
    with torch.autocast("cpu", torch.bfloat16, enabled=len(x) < B):
        return middle(x).float()


def hooked():
    """Its own hook is called behind those of all modules."""
    linear = nn.Linear(WIDTH, WIDTH)
    linear.register_forward_hook(lambda module, given, gave: gave - 0.5 * gave.mean(0, keepdim=True))
    return linear


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        return slope @ weight, slope.flatten(0, 1).T @ x.flatten(0, 1) + 0.01 * x.mean()


class OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x):
        return OwnGradient.apply(x, self.weight)


class Model(nn.Module):
    """A middle of any kind between two linear layers; `call(middle, hidden)` calls it."""

    def __init__(self, middle, call=lambda middle, hidden: middle(hidden)):
        super().__init__()
        self.first, self.middle, self.last, self.call = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 3), call

    def forward(self, x):
        return self.last(torch.tanh(self.call(self.middle, self.first(x))).mean(1))


def squares(model, rows):
    return model(rows).square().mean()


def apart(model, rows):
    """A loss that couples rows."""
    unit = F.normalize(model(rows), dim=1)
    return F.cross_entropy(unit @ unit.T, torch.arange(len(unit)))


LAYOUTS = {
    "keywords in, a mapping out": (
        lambda: Model(ByName(), lambda middle, x: middle(hidden=x)["hidden"]),
        "forward of `middle.Neighbours`",
    ),
    "between modules": (lambda: Model(nn.Identity(), lambda middle, x: middle(x) - x.mean(0)), "forward of `Model`"),
    "called twice": (lambda: Model(Neighbours(), lambda middle, x: middle(torch.relu(middle(x)))), "forward of `middle`"),
    **{
        f"a checkpoint{', reentrant' * reentrant}": (
            lambda reentrant=reentrant: Model(Twice(), partial(checkpoint, use_reentrant=reentrant)),
            "`middle` (Twice): recomputed for the backward",
        )
        for reentrant in (False, True)
    },
    "a hook of its own": (lambda: Model(hooked()), "forward of `middle`"),
    "in another arithmetic": (lambda: Model(nn.Linear(WIDTH, WIDTH), rounded_if_few), "forward of `middle"),
    "a wrong gradient of a weight": (lambda: Model(OwnLinear()), "gradients of the parameters of `middle`"),
}


FAST = ("a checkpoint", "a wrong gradient of a weight")


@pytest.mark.parametrize("layout", few(FAST, LAYOUTS))
def test_a_fault_is_placed_whatever_the_layout(layout):
    make, where = LAYOUTS[layout]
    ((place, cause),) = places(training(make, NUMBERS, squares))
    assert where in place and cause != "auxiliary_loss_scale", (place, cause)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # dynamo's own
def test_a_fault_is_placed_in_compiled_code():
    """Hooks see one end of the modules inside it alone, or none."""

    def make():
        model = Model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        own = model.middle.forward
        model.middle.forward = torch.compile(
            lambda x: (y := own(x)) / y.norm(dim=0, keepdim=True), backend="eager", dynamic=False
        )
        return model

    ((place, _),) = places(training(make, NUMBERS, squares))
    assert "forward of `middle`" in place, place


@pytest.mark.slow
def test_weights_that_move_inside_the_window_are_told():
    report = audit(unusual_loops.discriminator_catches_more, batch_size=16, accumulation_steps=[4])
    assert any("in the weights of `0` (Linear)" in finding.message for finding in report.findings), str(report)


def test_a_loss_that_couples_rows_is_placed_in_no_module():
    ((place, cause),) = places(training(lambda: Model(nn.Identity()), NUMBERS, apart))
    assert place.startswith("in the loss") and cause == "non_separable_loss"


def test_weights_of_micro_batches_are_no_fault_of_a_module():
    assert not places(training(lambda: Model(nn.Identity()), NUMBERS, lambda model, rows: squares(model, rows) * len(rows)))
