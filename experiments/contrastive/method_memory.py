"""The memory at which each method for in-batch negatives stops working: the bytes that live in a step, over the window's size B.

All windows are cut into micro-batches of one size, b = `effective_batch` / N; B doubles from 2 b up to `effective_batch`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from accumulation_harness.config import LastWindow, TrialConfig
from accumulation_harness.experiments.contrastive.negatives import corpus_of
from accumulation_harness.experiments.contrastive.retrieval import Method, kept_beside, make_methods
from accumulation_harness.experiments.shared.measuring import Batch, OnStep, Row, Setting, pytree
from accumulation_harness.measure import memory
from accumulation_harness.recipes import contrastive


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per method, N and B: `peak_bytes` of a window, after others that made the state and filled the banks.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `corpus`, `arm`, `accumulation_steps`, `window` and `micro_batch` (samples), and `peak_bytes`.
    """
    return [row for config in of_sizes(setting.config) for row in _rows(setting.under(config))]


def of_sizes(config: TrialConfig) -> Iterator[TrialConfig]:
    """The trial at every B, with the micro-batch of each of its N.

    Args:
        config: The trial.

    Yields:
        Trials with B from 2 b on.
    """
    for num in config.accumulation_steps:
        b = config.effective_batch // num
        for parts in (2**k for k in range(1, num.bit_length())):
            yield dataclasses.replace(config, effective_batch=parts * b, accumulation_steps=(parts,))


def _rows(setting: Setting) -> Iterator[Row]:
    [num], size = setting.config.accumulation_steps, setting.config.effective_batch
    banks = [bank for bank in map(contrastive.bank_named, setting.config.methods) if bank is not None]
    filled = max((1, *(math.ceil(bank.size / size) for bank in banks), *(bank.since for bank in banks)))
    *earlier, last = setting.windows(1 + filled, last=LastWindow.drop)
    for method in make_methods(setting):
        workload = method.arm.workload
        for ids in earlier:
            method.take(workload.batch(ids))
        yield {
            "corpus": corpus_of(setting),
            "arm": method.name.name,
            "accumulation_steps": num,
            "window": size,
            "micro_batch": size // num,
            "peak_bytes": peak(method, workload.batch(last)),
        }


def peak(method: Method, window: Batch) -> int:
    """The most bytes that live while the method takes `window`, which counts too.

    Args:
        method: An arm with its state.
        window: Its samples.

    Returns:
        Bytes.
    """
    data = pytree.tensors((window.inputs, window.targets))
    # Not through a list, which would keep a bank alive that the step replaces.
    live = memory.Live(itertools.chain(memory.kept(method.arm), kept_beside(method.arm), data))
    with live:
        method.take(window)
    return live.most
