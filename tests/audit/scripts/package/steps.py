import torch


def windows(rows, micro_batch, accumulate):
    return [part.split(micro_batch) for part in torch.arange(rows).split(micro_batch * accumulate)]
