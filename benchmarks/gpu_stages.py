"""The stages of `benchmarks/gpu.py`: `python benchmarks/gpu_stages.py STAGE --device cuda --out DIR --seconds 60`.

An item of a stage leaves a line in DIR/rows.jsonl when it begins and one for each thing found, whose `holds` is the answer where
it is a question. An item that raises, crashes or hangs ends the process; the next process goes on behind it. With `--device cpu`
sizes are small, and all but the sweep and the benchmarks runs on the stand-in device of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from accumulation_harness.audit import audit
from accumulation_harness.config import (
    Data,
    Device,
    Execution,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.judge.gates import ROUNDING_GATE
from accumulation_harness.measure import plan
from accumulation_harness.measure.environment import describe
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting
from accumulation_harness.measure.memory import num_bytes
from accumulation_harness.measure.trial import accumulated, full_batch, run_trial, standard_candidates
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.results.store import Store
from accumulation_harness.results.sweeps import announced
from accumulation_harness.system import accelerator, doctor, pytree
from accumulation_harness.watch import watch
from accumulation_harness.watch.report import Report

ROOT = Path(__file__).parents[1]
ADAM = OptimizerConfig(name=OptimizerName.adam, lr=3e-3)
RESNET = WorkloadConfig(model=Model.resnet18)
SMALL: dict[str, Any] = {"effective_batch": 16, "steps": 3, "algebra_steps": 2, "probe_every": 2, "referee_every": 2}
Found = dict[str, Any]
Arms = list[dict[str, Any]]
Step = Callable[[nn.Module, Tensor, Tensor, int], None]  # takes the micro-batches of a window into `.grad`


class Here:
    """The device, the sizes that suit it, and the time there is."""

    def __init__(self, device: str, out: Path, seconds: float) -> None:
        self.is_card, self.out, self.deadline = device != "cpu", out, time.monotonic() + seconds
        self.stand_in: Any = None
        if not self.is_card:
            from tests.simgpu import device as stand_in  # before the first backward, as it says

            self.stand_in = stand_in
        self.device = choose_device(Device.cuda) if self.is_card else self.stand_in.DEVICE

    @property
    def left(self) -> float:
        """Seconds of the stage's time."""
        return self.deadline - time.monotonic()

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the stand-in is the device where there is no card."""
        return contextlib.nullcontext() if self.is_card else self.stand_in.entered_as_cuda()

    def config(self, **changes: Any) -> TrialConfig:
        """A trial with `changes`; where there is no card, a small one."""
        if self.is_card:
            return TrialConfig(**{"device": Device.cuda} | changes)
        workload = changes.get("workload", WorkloadConfig(model=Model.mlp))
        model = Model.conv if workload.model == Model.resnet18 else workload.model
        return TrialConfig(**changes | SMALL | {"workload": replace(workload, model=model, width=2, depth=1)})

    def trial(self, **changes: Any) -> Arms:
        """The judged arms of that trial."""
        with self.entered():
            return run_trial(self.config(**changes), lambda step, rows: None).arms

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        """How often the host waits for the device inside: what CUDA's sync debug mode warns of, or the stand-in counts."""
        told: list[str] = []
        if not self.is_card:
            seen = self.stand_in.READS, self.stand_in.WAITED
            before = [counts.copy() for counts in seen]
            yield told
            told += [name for now, then in zip(seen, before, strict=True) for name in (now - then).elements()]
            return
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("warn")  # warns that it is a prototype
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield told
        finally:
            torch.cuda.set_sync_debug_mode("default")
        told += [str(one.message) for one in caught if "synchroniz" in str(one.message)]


# -- 1: the machine ------------------------------------------------------------------------------------------------------


def versions(here: Here) -> Iterator[Found]:
    """What the page of findings names."""
    device = here.device if here.is_card else torch.device("cpu")
    yield {
        "what": "machine",
        "number": accelerator.why_unavailable() or "",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **describe(device),
    }
    yield {"what": "versions", "number": "; ".join(doctor.machine_lines())}


def products(here: Here) -> Iterator[Found]:
    """How fast products of matrices are, format by format; and that float32 is IEEE's where the harness computes."""
    size, device = (8192, here.device) if here.is_card else (128, torch.device("cpu"))
    a, b = torch.randn(2, size, size, dtype=torch.float64, device=device)
    exact = a @ b

    def error(x: Tensor, y: Tensor) -> float:
        return float((x @ y - exact).norm() / exact.norm())

    for name in ("float64", "float32", "TF32", "float16", "bfloat16"):
        x, y = (one.to(getattr(torch, name, torch.float32)) for one in (a, b))
        with contextlib.nullcontext() if name == "TF32" else accelerator.ieee_float32():
            if name == "TF32":
                torch.set_float32_matmul_precision("high")
            off, seconds = error(x, y), timed(here, lambda x=x, y=y: x @ y)  # type: ignore[misc]
        holds = off < 1e-5 if name == "float32" else None
        question = "float32 products are IEEE's where the harness computes" if name == "float32" else f"products in {name}"
        yield {"what": question, "holds": holds, "number": f"{2e-12 * size**3 / seconds:.3g} TFLOP/s, error {off:.1e}"}


def timed(here: Here, compute: Callable[[], Any], times: int = 5) -> float:
    """Seconds of one call: the median, without the first."""
    taken = []
    for _ in range(times + 1):
        started = time.perf_counter()
        compute()
        if here.is_card:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


# -- 2: what only a card can show ----------------------------------------------------------------------------------------


def judged(arms: Arms) -> Found:
    """Whether all arms are equivalent, and how near their rounding came to the gate."""
    worst = max(arms, key=lambda row: row["rounding_ratio"])
    told = f"{worst['rounding_ratio'] / ROUNDING_GATE:.2f} of the rounding gate at N = {worst['accumulation_steps']}"
    wrong = [
        f"{row['arm']}, N = {row['accumulation_steps']}: {row['verdict']} {row['cause']}"
        for row in arms
        if row["verdict"] != "equivalent"
    ]
    number = f"{len(arms) - len(wrong)} of {len(arms)} arms equivalent, {told}"
    return {"holds": not wrong, "number": "; ".join([number, *wrong])}


def rounding_by_shape(here: Here) -> Iterator[Found]:
    """Convolutions of b samples and of B: cuDNN may choose another algorithm for each."""
    settings = {"workload": RESNET, "norm": Norm.group, "optimizer": ADAM, "steps": 5, "algebra_steps": 3}
    arms = here.trial(accumulation_steps=(2, 4, 8, 16), **settings)
    yield {"what": "a right float32 arm stays under the rounding gate, whatever cuDNN chooses by shape", **judged(arms)}


def same_bits(here: Here) -> Iterator[Found]:
    """Two runs of an accumulated arm from the same seed."""
    for precision in (Precision.float32, Precision.float16):
        config = here.config(workload=RESNET, norm=Norm.batch, precision=precision, accumulation_steps=(4,))
        first, again = trained(here, config), trained(here, config)
        differing = sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
        number = f"{differing:,} of {sum(map(Tensor.numel, first)):,} weights differ after 5 windows"
        yield {"what": f"two runs give the same bits ({precision})", "holds": differing == 0, "number": number}


def trained(here: Here, config: TrialConfig, windows: int = 5) -> list[Tensor]:
    """Weights, on the host, of the accumulated arm of the configuration after that many windows."""
    with here.entered(), deterministic(config.precision, here.device):
        setting = Setting(config, here.device)
        arm = setting.arm(accumulated(config, config.accumulation_steps[0]), steps=windows)
        for ids in setting.windows(windows):
            take_step(arm, arm.workload.batch(ids))
        return [p.detach().cpu() for p in arm.model.parameters()]


@contextlib.contextmanager
def graphs(here: Here) -> Iterator[torch.device]:
    """Inside, forwards can be captured: on the card, or on the CPU by what does the same to memory."""
    if here.is_card:
        yield here.device
        return
    from accumulation_harness.measure import lock_step
    from accumulation_harness.recipes import execution
    from tests.simgpu.graphs import graphed_on_cpu

    allowed = (mock.patch.object(module, "check_available", lambda *_: None) for module in (execution, lock_step))
    with mock.patch.object(torch.cuda, "make_graphed_callables", graphed_on_cpu), next(allowed), next(allowed):
        yield torch.device("cpu")


def captured(here: Here) -> Iterator[Found]:
    """Each shape of a micro-batch is a graph of its own: 1,500 samples end in a short window after 11 of 128."""
    settings: dict[str, Any] = {"effective_batch": 128, "steps": 13, "algebra_steps": 2, "accumulation_steps": (2, 4, 8)}
    mlp = WorkloadConfig(model=Model.mlp, width=8 if here.is_card else 2)
    with graphs(here) as device:
        config = TrialConfig(workload=mlp, device=Device(device.type), execution=Execution.cuda_graph, **settings)
        arms = run_trial(config, lambda step, rows: None).arms
    yield {"what": "captured graphs over N = 2, 4, 8 and a short window are equivalent to the eager full batch", **judged(arms)}


def plainly(model: nn.Module, inputs: Tensor, targets: Tensor, num: int) -> None:
    """As a graph's gradients are added up safely: `.grad` is memory of its own."""
    for x, y in zip(inputs.chunk(num), targets.chunk(num), strict=True):
        (functional.cross_entropy(model(x), y) / num).backward()


def added_to_the_last(model: nn.Module, inputs: Tensor, targets: Tensor, num: int) -> None:
    """Sums what each replay leaves in `.grad`, and adds the sum to `.grad`, where the last one still is."""
    total: list[Tensor] = []
    for x, y in zip(inputs.chunk(num), targets.chunk(num), strict=True):
        model.zero_grad()
        (functional.cross_entropy(model(x), y) / num).backward()
        given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        total = [a + b for a, b in zip(total, given, strict=True)] if total else given
    if num > 1:
        for p, kept in zip(model.parameters(), total, strict=True):
            assert p.grad is not None
            p.grad.add_(kept)


def looked_at(loop: Callable[[int, int, bool], Report | None]) -> tuple[Any, Report]:
    """What an audit and a watch say of `loop(batch_size, accumulation_steps, is_watched)`."""
    report = audit(
        lambda batch_size, accumulation_steps: loop(batch_size, accumulation_steps, False) and None,
        batch_size=16,
        accumulation_steps=[4],
    )
    seen = loop(4, 4, True)
    assert seen is not None
    return report, seen


def small_loop(
    device: torch.device, step: Step, prepare: Callable[[nn.Module, Tensor], nn.Module], *middle: nn.Module
) -> Callable[[int, int, bool], Report | None]:
    """Four windows of a small network on the device, whose model `prepare` gets with a micro-batch."""

    def loop(batch_size: int, accumulation_steps: int, is_watched: bool) -> Report | None:
        torch.manual_seed(0)
        size = batch_size * accumulation_steps
        inputs, targets = torch.randn(4, size, 16), torch.randint(5, (4, size))
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), *middle, nn.Linear(32, 5)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared = prepare(model, inputs[0, :batch_size].to(device, copy=True))
        with watch(model, optimizer, tell=None) if is_watched else contextlib.nullcontext() as seen:
            for x, y in zip(inputs.to(device), targets.to(device), strict=True):
                optimizer.zero_grad()
                step(prepared, x, y, accumulation_steps)
                optimizer.step()
        return seen.report() if seen else None

    return loop


def in_a_graph(model: nn.Module, sample: Tensor) -> nn.Module:
    """With the forward and backward captured for the sample's shape."""
    graphed: Any = torch.cuda.make_graphed_callables(model, (sample,))
    return cast(nn.Module, graphed)


def with_own_gradients(model: nn.Module, sample: Tensor) -> nn.Module:
    """The same, and `.grad` never the graph's own memory."""
    for p in model.parameters():
        p.register_hook(torch.clone)
    return in_a_graph(model, sample)


def static_buffers(here: Here) -> Iterator[Found]:
    """The next replay writes where `.grad` is; a right loop over the same graph stands beside."""
    with graphs(here) as device:
        report, seen = looked_at(small_loop(device, plainly, with_own_gradients))
        yield {
            "what": "a right loop over a captured graph is different for neither audit nor watch",
            "holds": report.verdict != "different" and seen.verdict == "equivalent",
            "number": both(report, seen),
        }
        report, seen = looked_at(small_loop(device, plainly, in_a_graph))
        yield {
            "what": "static gradient buffers that become `.grad` are named by the watch, and different for the audit",
            "holds": report.verdict == "different" and [*seen.causes] == ["micro_batches_lost"],
            "number": both(report, seen),
        }
        report, seen = looked_at(small_loop(device, added_to_the_last, with_own_gradients))
        yield {
            "what": "a static gradient added to its own sum is found, with its weights",
            "holds": report.verdict == "different" and "count 1, 1, 1, 2 times" in both(report, seen),
            "number": both(report, seen),
        }


def both(report: Any, seen: Report) -> str:
    """What the audit and the watch say, in a line."""
    said = [f"{one.cause}: {one.message}" for one in seen.findings[:1]]
    return f"audit {report.verdict} {', '.join(report.causes)}; watch {' '.join([seen.verdict, *said])}"


def scaler(here: Here) -> Iterator[Found]:
    """Unscaled once per window, clipped behind it."""
    arms = here.trial(
        precision=Precision.float16,
        norm=Norm.group,
        clip_norm=1.0,
        optimizer=ADAM,
        accumulation_steps=(4,),
        steps=26,
        algebra_steps=5,
    )
    yield {"what": "float16 with the scaler is equivalent", **judged(arms)}


def one_wait(here: Here) -> Iterator[Found]:
    """For all arms of a step together, where the table is read."""
    for execution in (Execution.eager, Execution.cuda_graph) if here.is_card else (Execution.eager,):
        config = here.config(norm=Norm.group, clip_norm=1.0, execution=execution, accumulation_steps=(4,))
        with here.entered(), deterministic(config.precision, here.device):
            setting = Setting(config, here.device)
            recipes = {REFERENCE: full_batch(config), **{one.label: one.recipe for one in standard_candidates(config)}}
            lock, ids = LockStep(setting.arms(recipes, steps=4, clip_norm=1.0), config.seed), next(setting.windows())
            for _ in range(2):  # the optimizer's state is made, models are captured
                lock.step(ids, gradients="compared")
            with here.waits() as waits:
                lock.step(ids, gradients="compared")
        number = f"{len(waits)} of {len(recipes)} arms together" + (f": {waits[:3]}" if len(waits) != 1 else "")
        yield {"what": f"one wait of the host per step ({execution})", "holds": len(waits) == 1, "number": number}


class Masked(nn.Module):
    """Dropout that is no layer: only the device's generator shows that it draws."""

    def forward(self, x: Tensor) -> Tensor:
        """Half of `x`."""
        return x * (torch.rand(x.shape, device=x.device) > 0.5)


def masks(here: Here) -> Iterator[Found]:
    """Drawn by a layer or by hand, from the device's own generator."""
    for kind, expected in ((partial(nn.Dropout, 0.5), ["stochastic_layers"]), (Masked, ["stochastic_layers"]), (nn.Identity, [])):
        with here.entered():
            report, _ = looked_at(small_loop(here.device, plainly, lambda model, sample: model, kind(), kind()))
        found = [*report.causes]
        name = kind.func.__name__ if isinstance(kind, partial) else kind.__name__
        yield {
            "what": f"masks on the device: {name}",
            "holds": found == expected,
            "number": f"{report.verdict} {', '.join(found)}".strip(),
        }


def agrees_with_the_cpu(here: Here) -> Iterator[Found]:
    """Losses of the same training in float64."""
    settings: dict[str, Any] = {"precision": Precision.float64, "steps": 5, "algebra_steps": 1, "accumulation_steps": (4,)}
    config, losses = here.config(**settings), list[list[float]]()
    for one, entered in ((config, here.entered()), (replace(config, device=Device.cpu), contextlib.nullcontext())):
        losses.append([])
        with entered:
            run_trial(one, lambda step, rows: losses[-1].append(rows[1]["loss"]))
    off = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    yield {"what": "CPU and CUDA agree in float64", "holds": off < 1e-10, "number": f"losses at most {off:.1e} apart"}


def compiled(here: Here) -> Iterator[Found]:
    """Only on a card: the tests compile on the CPU."""
    execution = Execution.compile if here.is_card else Execution.eager
    arms = here.trial(execution=execution, split=Split.ragged, accumulation_steps=(4,), steps=5, algebra_steps=3)
    yield {"what": "compiled arms are equivalent to the eager full batch, micro-batches of unequal sizes", **judged(arms)}


# -- 3: the main grid ----------------------------------------------------------------------------------------------------


def grid(here: Here) -> Iterator[Found]:
    """`conf/experiment/gpu.yaml`: a row for each trial that ended in time."""
    small = "device=cpu optimizer=sgd precision=float32 workload.width=1 effective_batch=8 accumulation_steps=[2]"
    sizes = f"device=cuda workers={min(8, (os.cpu_count() or 2) // 2)} steps=10 algebra_steps=3"
    chosen = sizes if here.is_card else f"{small} steps=2 algebra_steps=1"
    settings = f"+experiment=gpu tracking.mode=disabled results={here.out}/trials {chosen}".split()
    command = [sys.executable, "-m", "accumulation_harness", "run", *settings]
    with contextlib.suppress(subprocess.TimeoutExpired):  # what ended is stored
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=0.9 * here.left)
    found = [*Store(here.out / "trials").status()]
    ended, asked = sum(one.stored is not None for one in found), sum(len(one.trials) for one in announced(here.out / "trials")[0])
    yield {"what": "all trials ended in time", "holds": ended == asked > 0, "number": f"{ended} of {asked}"}
    for status in found:
        what = " ".join((status.trial, status.state))
        if status.stored is None:
            yield {"what": what, "holds": False if status.detail else None, "number": status.detail or str(status.state)}
            continue
        arms, seconds = status.stored.arms, sum(status.stored.seconds.values())
        expected = "batch_statistics" if arms[0]["norm"] == Norm.batch else "equivalent"
        told = {f"{row['arm']} {row['accumulation_steps']}": row["cause"] if row["explained"] else row["verdict"] for row in arms}
        holds = all(name == (expected if arm.startswith("accumulated") else "equivalent") for arm, name in told.items())
        labels = [arms[0][key] for key in ("workload", "norm", "optimizer", "precision")]
        number = f"{', '.join(f'{arm}: {name}' for arm, name in told.items())}; {seconds:.0f} s"
        yield {
            "what": " ".join(labels),
            "holds": holds,
            "number": number,
        }


# -- 4: a model of 125 million parameters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run of the large model: seconds of each window, the most bytes it took, and what its watch says."""

    seconds: list[float]
    peak: int
    report: Report | None


@functools.cache
def gpt2(here: Here) -> nn.Module:
    """With random weights, which take longer to draw than a window takes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny: dict[str, Any] = dict(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **({} if here.is_card else tiny))
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config)
    return cast(nn.Module, model.to(here.device).train())


def large(
    here: Here, is_watched: bool, divides: bool, *, batch_size: int = 4, accumulation_steps: int = 4, windows: int = 8
) -> Trained:
    """AdamW, and the loop that everybody writes."""
    torch.manual_seed(0)
    shape = windows, batch_size * accumulation_steps, 512 if here.is_card else 8
    full: Any = gpt2(here)
    rows = torch.randint(full.config.vocab_size, shape).to(here.device)
    device = accelerator.module(here.device)
    before = device.memory_allocated(here.device)
    device.reset_peak_memory_stats(here.device)
    model = copy.deepcopy(full)
    optimizer, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4), []
    with watch(model, optimizer, tell=None) if is_watched else contextlib.nullcontext() as seen:
        for window in rows:
            started = time.perf_counter()
            for part in window.split(batch_size):
                loss = model(input_ids=part, labels=part).loss
                (loss / accumulation_steps if divides else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            device.synchronize(here.device)
            seconds.append(time.perf_counter() - started)
    return Trained(seconds, device.max_memory_allocated(here.device) - before, seen.report() if seen else None)


def named(here: Here) -> str:
    """The model, with its size."""
    return f"GPT-2 of {sum(p.numel() for p in gpt2(here).parameters()) / 1e6:.3g} million parameters"


def watched(here: Here) -> Iterator[Found]:
    """The right loop and the one without the division; its time and memory beside those of a run that nobody watches."""
    with here.entered(), accelerator.ieee_float32():
        size = named(here)
        large(here, False, True, windows=2)  # kernels are loaded
        plain, seen = large(here, False, True), large(here, True, True)
        verdict, causes = told(seen.report)
        yield {
            "what": f"{size}: the right loop, watched, is equivalent",
            "holds": (verdict, causes) == ("equivalent", []),
            "number": verdict,
        }
        usual, watching = statistics.median(plain.seconds[4:]), statistics.median(seen.seconds[4:])
        close = statistics.median(seen.seconds[1:4])
        times = f"{watching / usual:.3f} times ({usual:.3g} s), {close / usual:.3f} where it looks closely"
        yield {
            "what": f"{size}: a watched window over a plain one",
            "number": f"{times}; memory {seen.peak / plain.peak:.3f} times ({plain.peak / 1e9:.3g} GB)",
        }
        verdict, causes = told(large(here, True, False).report)
        yield {
            "what": f"{size}: the missing division, watched, is named",
            "holds": causes == ["loss_not_divided"],
            "number": f"{verdict} {', '.join(causes)}",
        }


def told(report: Report | None) -> tuple[str, list[str]]:
    """Verdict and causes."""
    assert report is not None
    return str(report.verdict), [*map(str, report.causes)]


def audited(here: Here) -> Iterator[Found]:
    """The same two loops, three windows of each, audited."""
    device = accelerator.module(here.device)
    with here.entered(), accelerator.ieee_float32():
        size = named(here)
        started = time.perf_counter()
        plain = large(here, False, True, batch_size=16, accumulation_steps=1, windows=3)
        usual = time.perf_counter() - started
        for divides, expected in ((True, []), (False, ["loss_not_divided"])):
            peaks = [0]

            def train(batch_size: int, accumulation_steps: int, divides: bool = divides, peaks: list[int] = peaks) -> None:
                large(here, False, divides, batch_size=batch_size, accumulation_steps=accumulation_steps, windows=3)
                peaks.append(device.max_memory_allocated(here.device))

            started = time.perf_counter()
            report = audit(train, batch_size=16, accumulation_steps=[4])
            taken, causes = time.perf_counter() - started, [*report.causes]
            which = "the missing division, audited, is named" if expected else "the right loop, audited, is equivalent"
            number = f"{report.verdict} {', '.join(causes)}".strip() + f"; {taken / usual:.1f} times a plain run ({usual:.2g} s)"
            peak = f"; memory {max(peaks) / plain.peak:.2f} times ({plain.peak / 1e9:.3g} GB)"
            yield {
                "what": f"{size}: {which}",
                "holds": causes == expected and report.verdict == ("different" if expected else "equivalent"),
                "number": number + peak,
            }


# -- 5: the planner beside the allocator ---------------------------------------------------------------------------------


def planner(here: Here, **settings: Any) -> Iterator[Found]:
    """For each b, with N = B / b: the plan's bytes, the allocator's, and samples per second."""
    config = here.config(effective_batch=256, **settings)
    size = config.effective_batch
    device = accelerator.module(here.device)
    with here.entered(), deterministic(config.precision, here.device):
        static, per_sample, step = plan.fit_memory(config)
        for b in sorted({size, size // 4, size // 16}):
            planned = plan.Plan(b, size // b, static, per_sample, step).total
            setting = Setting(config, here.device)
            ids = torch.arange(size) % setting.exact.num_samples
            before = device.memory_allocated(here.device)
            arm = setting.arm(accumulated(config, size // b), steps=10)
            window = arm.workload.batch(ids)
            before += num_bytes(pytree.tensors((window.inputs, window.targets)))
            take_step(arm, window)
            device.reset_peak_memory_stats(here.device)
            seconds = timed(here, lambda arm=arm, window=window: take_step(arm, window), 3)  # type: ignore[misc]
            peak = device.max_memory_allocated(here.device) - before
            bytes_told = f"{planned / 1e6:.4g} MB planned, {peak / 1e6:.4g} MB allocated ({planned / peak:.3f})"
            number = f"{bytes_told}, {size / seconds:,.0f} samples/s"
            what = f"the plan holds: {config.workload.label} {config.precision}, b = {b}, N = {size // b}"
            yield {"what": what, "holds": peak <= planned / (1 - plan.MARGIN), "number": number}
            del arm, window, setting


# -- 6: the cost of measuring --------------------------------------------------------------------------------------------


def costs(name: str, here: Here) -> Iterator[Found]:
    """A benchmark of `benchmarks/run.py` on this machine."""
    few = ("--steps", "20" if here.is_card else "2", *(("--few",) if name == "sweep" or not here.is_card else ()))
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), name, "--rounds", "1", *few]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.endswith(" |") and "processor time" not in line:
            what, processor, clock, rounds = line.strip("| ").split(" | ")
            yield {"what": what, "number": f"{clock} on the clock, {processor} of processor time, {rounds} rounds"}


CLAIMS = (rounding_by_shape, same_bits, captured, static_buffers, scaler, one_wait, masks, agrees_with_the_cpu, compiled)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=2)
PLANNED: dict[str, dict[str, Any]] = {
    "resnet": {"workload": RESNET, "norm": Norm.group},
    "text": {"workload": TEXT, "norm": Norm.layer},
}
STAGES: dict[str, dict[str, Callable[[Here], Iterator[Found]]]] = {
    "machine": {"versions": versions, "products": products},
    "claims": {claim.__name__: claim for claim in CLAIMS},
    "grid": {"grid": grid},
    "large": {"watched": watched, "audited": audited},
    "planner": {
        f"{name}_{precision}": partial(planner, precision=precision, optimizer=ADAM, **settings)
        for (name, settings), precision in itertools.product(PLANNED.items(), (Precision.float32, Precision.bfloat16))
    },
    "cost": {name: partial(costs, name) for name in ("watched", "sweep", "startup")},
}


def main() -> None:
    """Run what the stage has not begun yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    here = Here(options.device, options.out, options.seconds)
    path = options.out / "rows.jsonl"
    known = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    begun = {row["item"] for row in known if row["stage"] == options.stage and "begun" in row}
    with path.open("a") as file:
        print(json.dumps({"stage": options.stage, "items": [*STAGES[options.stage]]}), file=file, flush=True)
        left = {name: item for name, item in STAGES[options.stage].items() if name not in begun}
        for name, item in left.items():

            def note(item: str = name, **row: Any) -> None:
                print(json.dumps({"stage": options.stage, "item": item, **row}), file=file, flush=True)

            note(begun=True)
            is_last = name == [*left][-1]  # one that hangs leaves the others half of the time
            faulthandler.dump_traceback_later(max(1.0, here.left / (1 if is_last else 2)), exit=True)
            started = time.monotonic()
            try:
                for row in item(here):
                    note(**row, is_card=here.is_card)
            except Exception as error:
                note(error=f"{type(error).__name__}: {error}".splitlines()[0])
                raise  # the next process begins with a device that has seen no error
            note(seconds=time.monotonic() - started)
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
