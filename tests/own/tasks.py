"""Tasks as a user would write them: right ones, some that couple rows, and some that cannot be judged."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

SAMPLES = 40  # trained on; another 12 are held out


class Images:
    """Tuples of an image and a label, a model with BatchNorm."""

    def __init__(self, width=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(52, 2, 5, 5, generator=generator)
        self.labels = torch.randint(3, (52,), generator=generator)
        self.width, self.samples = width, SAMPLES

    def model(self, norm):
        convolution = nn.Conv2d(2, self.width, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(self.width), nn.ReLU(), nn.Flatten(), nn.Linear(self.width * 25, 3))

    def train(self):
        return [(self.images[i], int(self.labels[i])) for i in range(self.samples)]

    def held_out(self):
        return [(self.images[i], int(self.labels[i])) for i in range(self.samples, len(self.images))]

    def losses(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="none")


def images(model=None, task=Images, **methods):
    """The class of a task with another model, or with other methods."""
    return type("Other", (task,), methods | ({"model": lambda self, norm: model()} if model else {}))


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


def hidden(first):
    return flat(first, nn.Tanh(), nn.Linear(8, 3))


# BatchNorm without scale and shift, and without running statistics.
OddBatchNorm = images(
    lambda: nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, track_running_stats=False), flat(nn.Linear(50, 3)))
)

# Of one class the loss is zero, whatever the weights are.
Easy = images(
    lambda: hidden(nn.Linear(50, 8)),
    losses=lambda self, outputs, batch: F.cross_entropy(outputs, batch[1], reduction="none") * (batch[1] != 0),
)


Rows = images(lambda: flat(nn.BatchNorm1d(50), nn.Linear(50, 3)))  # BatchNorm of vectors, which a single row does not have


def deep():
    """BatchNorm of vectors in 24 layers, which magnify what rounding does to a batch of few rows."""
    layers = [one for _ in range(24) for one in (nn.Linear(50, 50, bias=False), nn.BatchNorm1d(50), nn.ReLU())]
    return flat(*layers, nn.Linear(50, 3))


Deep = images(deep)


class Signs(nn.Module):
    """Weights of which one is read in whole numbers, as of an orthogonal parametrization."""

    def __init__(self):
        super().__init__()
        self.layer, self.sign = nn.Linear(50, 3), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.sign.int() + 0 * self.sign


Signed = images(Signs)


class Frozen(Images):
    """A part that is not trained."""

    def model(self, norm):
        model = flat(nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 3))
        model[1].requires_grad_(False)
        return model


Drops = images(lambda: flat(nn.Linear(50, 8), nn.Dropout(0.2), Dropping(), nn.Linear(8, 3)))


class Variational(Images):
    """An autoencoder with noise of its own, and dropout that nothing tells of."""

    def model(self, norm):
        return Autoencoder()

    def losses(self, outputs, batch):
        image, mean, logarithm = outputs
        divergence = 0.5 * (mean.square() + logarithm.exp() - logarithm - 1).sum(1)
        return (image - batch[0].flatten(1)).square().sum(1) + divergence


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(50, 6), nn.Linear(3, 50)

    def forward(self, x):
        mean, logarithm = self.encoder(F.dropout(x.flatten(1), 0.1)).chunk(2, dim=1)
        code = mean + (0.5 * logarithm).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, logarithm


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_dropout = 0.1

    def forward(self, x):
        return F.dropout(x, self.attention_dropout, self.training)


class NoisyCode(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(50, 8), nn.Linear(4, 50)

    def forward(self, x):
        mean, logarithm = self.encoder(x.flatten(1)).chunk(2, dim=1)
        return self.decoder(mean + (0.5 * logarithm).exp() * torch.randn_like(mean)), mean, logarithm


OneDraw = images(NoisyCode, Variational)  # a code of four numbers, and a single draw in a forward


class Encoding(Mapping[str, Tensor]):
    """A mapping that is no dictionary, as tokenizers give."""

    def __init__(self, data):
        self.data = dict(data)

    def __getitem__(self, key):
        return self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


@dataclass
class Logits:
    logits: Tensor
    steps: int = 1


class Tagger(nn.Module):
    """Two matrices that are one tensor, and a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("places", torch.linspace(0, 1, 16)[:, None], persistent=False)

    def forward(self, input_ids, mask):
        hidden = self.embedding(input_ids) + self.places[: input_ids.shape[1]]
        return Logits(self.head(self.norm(hidden.cumsum(1) * mask[..., None])))


class Ragged:
    """Rows of unequal lengths, terms counted, mappings in and a data class out."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 14, (52,), generator=generator)
        self.rows = [torch.randint(1, 11, (int(length),), generator=generator).numpy() for length in lengths]

    def model(self, norm):
        return Tagger()

    def train(self):
        return self.rows[:SAMPLES]

    def held_out(self):
        return self.rows[SAMPLES:]

    def collate(self, samples):
        ids = nn.utils.rnn.pad_sequence([torch.from_numpy(one) for one in samples], batch_first=True)
        return Encoding({"input_ids": ids, "mask": (ids > 0).float(), "labels": ids.masked_fill(ids == 0, -100)})

    def losses(self, outputs, batch):
        scores = outputs.logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(scores, batch["labels"][:, 1:], ignore_index=-100, reduction="none").sum(1)

    def terms(self, batch):
        return (batch["labels"][:, 1:] != -100).sum(1)

    def correct(self, outputs, batch):
        return (outputs.logits[:, :-1].argmax(2) == batch["labels"][:, 1:]).sum(1)


class RootMeanSquare(nn.Module):
    """As Llama's: in float32, whatever it is given."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        narrow = x.to(torch.float32)
        return self.weight * (narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Counts(nn.Module):
    """It counts its training forwards, in a buffer or in an attribute, and is another function after 20 of them."""

    def __init__(self, kind, after):
        super().__init__()
        self.net, self.after = flat(nn.Linear(50, 3)), after
        if kind == "buffer":
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        else:
            self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        out = self.net(x)
        return out * 1.1 if self.calls > self.after else out


class Counting(Images):
    def __init__(self, kind="buffer", after=20):
        super().__init__()
        self.of = kind, after

    def model(self, norm):
        return Counts(*self.of)


class Layers(nn.Module):
    """Two linear layers with BatchNorm between them, over two views of the images at once."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        views = torch.cat([x.flatten(1), x.flatten(1) + 0.1])
        return self.last(self.norm(self.first(views)).tanh()).chunk(2)


TwoViews = images(
    Layers,
    losses=lambda self, outputs, batch: (
        (outputs[0] - outputs[1]).square().sum(1) + F.cross_entropy(outputs[0], batch[1], reduction="none")
    ),
)


class Named(nn.Sequential):
    """One BatchNorm layer under two names, used once."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        self.logged = nn.ModuleList([self[2]])

    def forward(self, x):
        for layer in list(self)[:5]:
            x = layer(x)
        return x


TwoNames = images(Named)


class Weighing(nn.Module):
    """Outputs, and beside them two learnt weights that are no rows."""

    def __init__(self):
        super().__init__()
        self.net, self.weights = flat(nn.Linear(50, 3)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.net(x), self.weights


class LearntWeights(images(Weighing)):
    def losses(self, outputs, batch):
        out, (a, b) = outputs
        return (-a).exp() * super().losses(out, batch) + a + (-b).exp() * out.square().mean(1) + b


class Steps(nn.Module):
    """Outputs [T, n, C] with as many steps T as a window has rows."""

    def __init__(self):
        super().__init__()
        self.net = flat(nn.Linear(50, 9 * 4))

    def forward(self, x):
        return self.net(x).view(len(x), 9, 4).transpose(0, 1).log_softmax(-1)


# A model that takes its rows along the second dimension.
Turned = images(lambda: Turning(50, 3), forward=lambda self, model, batch: model(batch[0].transpose(0, 1)))


class TimeFirst(Images):
    """Batches [T, n, C], as recurrent layers take them, with as many steps T as a window has rows."""

    def __init__(self, steps=9):
        super().__init__()
        self.images, self.steps = self.images.flatten(2), steps

    def collate(self, samples):
        rows = torch.stack([image.mT[: self.steps] for image, _ in samples], 1)
        return rows, torch.tensor([label for _, label in samples])

    def model(self, norm):
        return Recurrent()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][-1])


class Padded(
    images(lambda: nn.Sequential(nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()))
):
    """Rows of unequal lengths, filled up to the longest of the batch, and a mean over the filling too."""

    def train(self):
        return [(image.flatten()[: 8 + 5 * (i % 7)], label) for i, (image, label) in enumerate(super().train())]

    held_out = train

    def collate(self, samples):
        rows, labels = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


class Scene:
    """A class of somebody's own, as libraries for graphs and boxes have: points of all rows, the row of each, labels."""

    def __init__(self, points, of, labels):
        self.points, self.of, self.labels = points, of, labels


class Scenes(images(lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)))):
    """Rows of unequal numbers of points in one tensor, in an object."""

    def collate(self, samples):
        points = [image.flatten(1).mT[: 2 + label] for image, label in samples]
        of = torch.cat([torch.full((len(one),), k) for k, one in enumerate(points)])
        return Scene(torch.cat(points), of, torch.tensor([label for _, label in samples]))

    def forward(self, model, batch):
        scores = model(batch.points)
        return torch.zeros(len(batch.labels), 3).to(scores).index_add(0, batch.of, scores)

    def losses(self, outputs, batch):
        return F.cross_entropy(outputs, batch.labels, reduction="none")


class Limited(nn.Module):
    """Two experts, each of which takes the first half of the rows that want it."""

    def __init__(self):
        super().__init__()
        self.choice, self.experts = nn.Linear(50, 2), nn.ModuleList(nn.Linear(50, 3) for _ in range(2))

    def forward(self, x):
        x = x.flatten(1)
        shares, made = self.choice(x).softmax(1), []
        for k, expert in enumerate(self.experts):
            wanted = shares.argmax(1) == k
            taken = wanted & (wanted.cumsum(0) <= len(x) / 4)
            made.append(taken[:, None] * shares[:, k, None] * expert(x))
        return made[0] + made[1]


Capacity = images(Limited)


class Turning(nn.Linear):
    def forward(self, x):
        return super().forward(x.transpose(0, 1).flatten(1))


class Timewise(images(Steps)):
    def losses(self, outputs, batch):
        n, labels = outputs.shape[1], torch.stack([batch[1] % 3 + 1, (batch[1] + 1) % 3 + 1], 1)
        return F.ctc_loss(outputs, labels, torch.full((n,), 9), torch.full((n,), 2), reduction="none")


class Refuses(Frozen):
    """A distribution as outputs, and losses that must be finite."""

    def forward(self, model, batch):
        return torch.distributions.Categorical(logits=model(batch[0]))

    def losses(self, outputs, batch):
        losses = -outputs.log_prob(batch[1])
        assert losses.isfinite().all()
        return losses


class Narrow(images(lambda: flat(nn.Linear(50, 8), RootMeanSquare(8), nn.Tanh(), RootMeanSquare(8), nn.Linear(8, 3)))):
    """Code that is written for float32: casts, a constant, a new tensor, a loss."""

    def forward(self, model, batch):
        shift = torch.zeros(len(batch[0]), 1, 1, 1)
        shift[:, 0] = 0.5
        outputs = model(batch[0].float() + shift)
        return F.softmax(outputs, dim=1, dtype=torch.float32)

    def losses(self, outputs, batch):
        return -outputs.float().gather(1, batch[1][:, None])[:, 0].clamp(min=torch.finfo(torch.float32).tiny).log()


class Waves(nn.Module):
    """Complex weights, and complex numbers that are not trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 3, dtype=torch.complex64) / 7)
        self.register_buffer("turns", torch.polar(torch.ones(50), torch.linspace(0, 3, 50)))

    def forward(self, x):
        return ((x.flatten(1) * self.turns) @ self.weight).abs()


Complex = images(lambda: nn.Sequential(Waves(), nn.Linear(3, 3)))


class Doubled(torch.autograd.Function):
    """A kernel for float32 alone."""

    @staticmethod
    def forward(ctx, x):
        assert x.dtype != torch.float64, "this kernel has no float64"
        return x + x

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * gradients[0]


class OfKernel(nn.Module):
    def forward(self, x):
        doubled = Doubled.apply(x)
        return doubled


def of_kernel(*norms):
    """A part that has no float64."""
    return flat(nn.Linear(50, 8), *norms, nn.ReLU(), OfKernel(), nn.Linear(8, 3))


Kernel = images(of_kernel)
KernelAndBatchNorm = images(lambda: of_kernel(nn.BatchNorm1d(8)))


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


class Contrast:
    """Named tuples of float64 arrays; the loss takes its negatives from the other rows."""

    def __init__(self):
        draws = np.random.default_rng(0)
        self.pairs = [Pair(draws.standard_normal(4), draws.standard_normal(4)) for _ in range(52)]

    def model(self, norm):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def train(self):
        return self.pairs[:SAMPLES]

    def held_out(self):
        return self.pairs[SAMPLES:]

    def forward(self, model, batch):
        return {"left": model(batch.left), "right": model(batch.right)}

    def losses(self, outputs, batch):
        scores = outputs["left"] @ outputs["right"].T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(50, 3)

    def forward(self, x):
        return self.linear((x - x.mean(0)).flatten(1))


Mixed = images(Centred)  # a layer of the user's own that mixes rows as BatchNorm does


Spectral = images(lambda: hidden(spectral_norm(nn.Linear(50, 8))))  # a power iteration goes on with each forward


OldSpectral = images(lambda: hidden(nn.utils.spectral_norm(nn.Linear(50, 8))))


SpectralAndBatchNorm = images(lambda: nn.Sequential(nn.BatchNorm2d(2), hidden(spectral_norm(nn.Linear(50, 8)))))


class Codebook(nn.Module):
    """Prototypes that follow their inputs: those of this forward are used by the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototype", torch.zeros(50))

    def forward(self, x):
        flat = x.flatten(1)
        shifted = flat - self.prototype
        with torch.no_grad():
            self.prototype.lerp_(flat.mean(0), 0.5)
        return shifted


FollowsInputs = images(lambda: nn.Sequential(Codebook(), hidden(nn.Linear(50, 8))))


MixedBesideBatchNorm = images(lambda: nn.Sequential(nn.BatchNorm2d(2), Centred()))


@dataclass
class Routed:
    logits: Tensor
    balance: Tensor  # 0-dim, of the whole batch


class Experts(nn.Module):
    """Three experts, each row by the best of them; a loss that balances their loads."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(50, 3), nn.Linear(50, 9)

    def forward(self, x):
        shares = self.gate(x.flatten(1)).softmax(1)
        chosen = F.one_hot(shares.argmax(1), 3).to(shares)
        logits = (self.experts(x.flatten(1)).unflatten(1, (3, 3)) * (chosen * shares)[..., None]).sum(1)
        return Routed(logits, 3 * chosen.mean(0) @ shares.mean(0))


class Balanced(images(Experts)):
    share = 0.5

    def losses(self, outputs, batch):
        return F.cross_entropy(outputs.logits, batch[1], reduction="none") + self.share * outputs.balance


Unbalanced = images(task=Balanced, share=0.0)  # the same model; its balance takes no part in the loss


BalancedAfterBatchNorm = images(lambda: nn.Sequential(nn.BatchNorm2d(2), Experts()), Balanced)


# -- tasks that cannot be judged ------------------------------------------------------------------------------------------


class NoLosses:
    def model(self, norm):
        return nn.Linear(1, 1)

    def train(self):
        return []

    held_out = train


def raises(*_):
    raise RuntimeError("no such luck")


def scaled(by):
    return lambda self, outputs, batch: by * F.cross_entropy(outputs, batch[1], reduction="none")


Raises = images(losses=raises)
MeanLoss = images(losses=lambda self, outputs, batch: F.cross_entropy(outputs, batch[1]))
NotANumber = images(losses=scaled(float("nan")))
Detached = images(losses=lambda *given: Images.losses(*given).detach())
Constant = images(losses=scaled(0))
DrawnLoss = images(losses=lambda self, outputs, batch: Images.losses(self, outputs + torch.randn_like(outputs), batch))
# Random numbers that are not torch's.
Foreign = images(forward=lambda self, model, batch: model(batch[0]) + np.random.default_rng().standard_normal())
Sparse = images(
    lambda: nn.EmbeddingBag(4, 3, mode="sum", sparse=True), forward=lambda self, model, batch: model(batch[1][:, None])
)
HeldOutOfOtherShape = images(held_out=lambda self: [(image[:, :4], label) for image, label in Images.held_out(self)])
InPlace = images(forward=lambda self, model, batch: model(batch[0].mul_(2)))
NegativeTerms = images(terms=lambda self, batch: torch.full((len(batch[1]),), -0.5))
TermsRaise = images(terms=lambda self, batch: batch["labels"])
Stream = images(train=lambda self: iter(Images.train(self)))
Endless = images(train=lambda self: range(10**18))
NoLength = images(train=lambda self: type("Rows", (list,), {"__len__": lambda rows: None})(Images.train(self)))
Meta = images(train=lambda self: [(image.to("meta"), label) for image, label in Images.train(self)])
WrongRows = images(
    collate=lambda self, samples: (torch.stack([image for image, _ in samples])[1:], torch.zeros(len(samples)).long())
)


class ChangingData(Images):
    def train(self):
        task = self

        class Augmented:
            def __len__(self):
                return SAMPLES

            def __getitem__(self, i):
                return task.images[i] + torch.rand(()), int(task.labels[i])

        return Augmented()


class Checkpointed(nn.Module):
    """Recomputed in the backward by the older of PyTorch's two ways."""

    def __init__(self):
        super().__init__()
        self.first, self.second = flat(nn.Linear(50, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.utils.checkpoint.checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=True))


class Forces(Frozen):
    """Gradients with respect to the inputs, in a forward that does not switch them on."""

    def forward(self, model, batch):
        images = batch[0].clone().requires_grad_()
        with self.gradients():
            outputs = model(images)
            return outputs, torch.autograd.grad(outputs.sum(), images, create_graph=True)[0]

    def gradients(self):
        return nullcontext()

    def losses(self, outputs, batch):
        return super().losses(outputs[0], batch) + outputs[1].square().sum((1, 2, 3))


class ForcesSwitchedOn(Forces):
    def gradients(self):
        return torch.enable_grad()


Lazy = images(lambda: flat(nn.LazyLinear(3)))


class NoDisk(Images):
    def train(self):
        class Files(list[Any]):
            def __getitem__(self, i):
                raise OSError("no such disk")

        return Files(super().train())


class Leaving(nn.Module):
    """A layer whose weight is computed before each forward, as pruning and weight_norm do; the last outputs are kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(50, 8), nn.Tanh(), nn.Linear(8, 3))
        prune.l1_unstructured(self.layers[0], "weight", amount=0.4)
        self.last = []

    def forward(self, x):
        self.last = [self.layers(x.flatten(1))]
        return self.last[0]


Leaves = images(Leaving)


class Weighted(Frozen):
    """Class weights with torch's own normaliser."""

    weights = torch.tensor([0.3, 1.7, 2.25])

    def losses(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], weight=self.weights.to(outputs), reduction="none")

    def terms(self, batch):
        return self.weights[batch[1]]


class Spare(Frozen):
    """A parameter that no forward uses."""

    def model(self, norm):
        model = super().model(norm)
        model.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return model


class Unlabelled(Weighted):
    """Rows of one class have no loss term."""

    weights = torch.tensor([0.0, 1.0, 1.0])


class Queueing(nn.Module):
    """Rows of the last forwards, in their order, are what the next one is compared with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(50, 4)
        self.register_buffer("queue", torch.randn(16, 4))

    def forward(self, x):
        own = self.layer(x.flatten(1))
        scores = torch.cat([own.sum(1, keepdim=True), own @ self.queue.T], dim=1)
        if self.training:
            self.queue = torch.cat([own.detach(), self.queue])[:16]
        return scores


Queue = images(
    Queueing, losses=lambda self, outputs, batch: F.cross_entropy(outputs, torch.zeros_like(batch[1]), reduction="none")
)


class Cancelling(Images):
    """A loss that is linear in the weights: in windows of as many labels of either kind, gradients cancel to a millionth."""

    def __init__(self):
        super().__init__()
        self.images = 1 + 1e-6 * torch.randn(52, 6, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(2, (52,), generator=torch.Generator().manual_seed(9))

    def model(self, norm):
        return nn.Linear(6, 1)

    def losses(self, outputs, batch):
        return outputs[:, 0] * (1 - 2 * batch[1])


class Alike(Frozen):
    """Pairs of equal images, of which the task makes something else before the model gets them."""

    def __init__(self):
        super().__init__()
        self.images[1::2] = self.images[::2]

    def forward(self, model, batch):
        return model(batch[0] / 2) + model(batch[0])


class Latent(nn.Linear):
    """Signs of latent weights within [-1, 1]."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        with torch.no_grad():
            self.weight.copy_((20 * self.weight).clamp(-1, 1))

    def forward(self, x):
        weight = self.weight.clamp(-1, 1)
        return nn.functional.linear(x, weight + (weight.sign() - weight).detach(), self.bias) / 7


Binary = images(lambda: flat(Latent(50, 6), nn.Tanh(), Latent(6, 3)))
BinaryRows = images(lambda: flat(nn.BatchNorm1d(50), Latent(50, 6), nn.Tanh(), Latent(6, 3)))


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(50, 3), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layer(x.flatten(1)) + 1e-12 * self.scale * x.flatten(1)[:, :3]


Temperature = images(Scaling)  # a tensor with 1e-12 of the whole gradient
HiddenGradient = images(Checkpointed)  # a reentrant checkpoint: no path of the graph but that of the inputs leads to its layers


class Scripted(Images):
    def model(self, norm):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(flat(nn.Linear(50, 3)))
