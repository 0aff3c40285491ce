"""The loop that everyone writes, of the same weights and windows as a study has, in float64."""

import itertools

import torch
import torch.nn.functional as F

from accumulation_harness.recipes.micro_batch import windows
from accumulation_harness.referee.gradients import flatten
from tests.trials import setting_of


class Loop:
    """A model and its data."""

    def __init__(self, config):
        setting = setting_of(config)
        self.config, self.model, self.data = config, setting.initial.double(), setting.exact

    def windows(self, size=None, last=None):
        config = self.config
        return windows(self.data.num_samples, size or config.effective_batch, config.seed, last or config.data.last_window)

    def loss(self, ids):
        batch = self.data.batch(ids)
        return F.cross_entropy(self.model(batch.inputs), batch.targets)

    def gradient(self, ids):
        """[P] of the mean loss."""
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(self.loss(ids), list(self.model.parameters()))])

    def gradients(self, num):
        """Gradient and running statistics of the first window in so many micro-batches of one size."""
        batch = self.data.batch(next(self.windows()))
        for x, y in zip(batch.inputs.chunk(num), batch.targets.chunk(num), strict=True):
            (F.cross_entropy(self.model(x), y) / num).backward()
        buffers = [value for name, value in self.model.named_buffers() if name.endswith(("mean", "var"))]
        return flatten(p.grad for p in self.model.parameters()), flatten(buffers)

    def train(self, parts=1, *, is_frozen=False):
        """The configured steps of SGD over windows in so many micro-batches; the losses of the windows."""
        self.model.train(not is_frozen)  # the models have no dropout
        own, losses = self.config.optimizer, []
        momentum = own.momentum if own.name == "momentum" else 0.0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=own.lr, momentum=momentum)
        for ids in itertools.islice(self.windows(), self.config.steps):
            optimizer.zero_grad()
            each = [self.loss(part) / parts for part in ids.chunk(parts)]
            for loss in each:
                loss.backward()
            optimizer.step()
            losses.append(sum(float(loss.detach()) for loss in each))
        return losses

    def held_out(self):
        """Loss and accuracy."""
        held = self.data.held_out
        with torch.no_grad():
            outputs = self.model.eval()(held.inputs)
        return float(F.cross_entropy(outputs, held.targets)), float((outputs.argmax(1) == held.targets).double().mean())

    def recalibrate(self):
        """Give every BatchNorm the statistics of all training samples, in one batch."""
        for layer in self.model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.reset_running_stats()
                layer.momentum = None  # the plain average, of one batch
        with torch.no_grad():
            self.model.train()(self.data.batch(torch.arange(self.data.num_samples)).inputs)
