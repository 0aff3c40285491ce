"""Captured graphs without a card: where inputs, outputs and gradients stay in one place."""

from unittest import mock

import torch


def without_hooks(module, *args, **kwargs):
    """A layer's call within a replay, in which no Python runs."""
    return module.forward(*args, **kwargs)


def graphed_on_cpu(module, sample, **_):
    """What `torch.cuda.make_graphed_callables` does to memory and to the module, whose forward it exchanges."""
    forward, parameters = module.forward, list(module.parameters())
    inputs = sample[0]  # torch/cuda/graphs.py: the arguments given are the static inputs themselves
    for _ in range(3):
        forward(inputs)  # warming up
    outputs, gradients = forward(inputs).detach(), [torch.empty_like(p) for p in parameters]

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given, *_):
            if inputs.data_ptr() != given.data_ptr():
                inputs.copy_(given)
            with torch.enable_grad(), mock.patch.object(torch.nn.Module, "__call__", without_hooks):
                ctx.live = forward(inputs)
            outputs.copy_(ctx.live)
            return outputs.detach()

        @staticmethod
        def backward(ctx, *grads):
            for place, new in zip(gradients, torch.autograd.grad(ctx.live, parameters, grads[0]), strict=True):
                place.copy_(new)
            return (None, *(place.detach() for place in gradients))

    module.forward = lambda given: Replay.apply(given, *parameters)
    return module
