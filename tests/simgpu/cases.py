"""What is run on the stand-in device: `python -m tests.simgpu.cases NAME ...` prints one line of JSON for each."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from accumulation_harness import plan, studies
from accumulation_harness.audit.observe.sample import Store
from accumulation_harness.audit.session import audit
from accumulation_harness.config import (
    Data,
    Model,
    Norm,
    NotReproducible,
    OptimizerConfig,
    OptimizerName,
    Precision,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.experiments.memory_and_time import memory_and_time
from accumulation_harness.measure import memory
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting, Watch
from accumulation_harness.measure.optimizer_state import leaves
from accumulation_harness.measure.training import train
from accumulation_harness.recipes import catalogue, contrastive
from accumulation_harness.recipes.determinism import deterministic
from accumulation_harness.recipes.execution import Captured
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Arm, Recipe, take_step
from accumulation_harness.recipes.sample_masks import masks_repeated
from accumulation_harness.referee.gradients import by_group
from accumulation_harness.trial import full_batch, judge_loop, null_recipes, run_trial, standard_candidates
from accumulation_harness.watch import watch
from accumulation_harness.workloads import Batch
from tests.simgpu import device
from tests.simgpu.trials import ADAM, ADAMW, BASE, F64, SHORT, TEXT, TOWERS, TRIALS


def trial(name: str) -> dict[str, Any]:
    """The record of a trial on the device, in short: verdicts and measurements."""
    config = TrialConfig(**{**BASE, **TRIALS[name]})
    before = torch.get_rng_state(), device.GENERATOR.get_state()
    with device.entered():
        record = studies.run(config, lambda step, rows: None)
    after = torch.get_rng_state(), device.GENERATOR.get_state()
    return {
        "arms": [(row["arm"], row["verdict"], row["cause"], row["explained"]) for row in record["arms"]],
        "measurements": record.get("measurements", []),
        "device": record["environment"]["device"],
        "generators_kept": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
    }


def setting_of(**changes: Any) -> Setting:
    return Setting(TrialConfig(**{**BASE, **changes}), device.DEVICE)


def planner() -> dict[str, Any]:
    """Peaks of a window in 2 micro-batches beside a ledger by hand, of a perceptron whose weights dwarf its activations."""
    found = {}
    for name, states, temporaries in (("sgd", 0, 0), ("momentum", 1, 0), ("adam", 2, 2)):
        with device.entered():
            wide = WorkloadConfig(model=Model.mlp, width=128)
            setting = setting_of(workload=wide, optimizer=OptimizerConfig(name=OptimizerName(name)), effective_batch=8)
            arm = setting.arm(Recipe(accumulation_steps=2, split=Even(4)), steps=2)
            sizes = [4 * p.numel() for p in arm.model.parameters()]
            taken = memory.of_step(arm, arm.workload.batch(torch.arange(8)))
        kept = (2 + states) * sum(sizes)  # weights, gradients, state
        found[name] = {
            "micro_batches": [taken.micro_batches, kept + max(sizes)],  # a gradient on its way to .grad
            "step": [taken.step, kept + temporaries * max(sizes)],
        }
    with device.entered():
        before = device.MEMORY.peak = device.MEMORY.now
        found["fit"] = plan.fit_memory(TrialConfig(**{**BASE, "optimizer": ADAM}))
        found["fit_took"] = device.MEMORY.peak - before
    return found


def masks() -> dict[str, Any]:
    """Where the device's generator stands at each micro-batch, of the fault that repeats masks and of the right recipe."""
    found: dict[str, Any] = {}
    with device.entered():
        setting = setting_of(workload=WorkloadConfig(model=Model.mlp, width=2, dropout=0.5))
        right = Recipe(accumulation_steps=4, split=Even(4))
        for name, recipe in (("repeated", masks_repeated(right)), ("right", right)):
            seen: list[int] = []

            def see(arm: Arm, seen: list[int] = seen) -> None:
                seen.append(hash(device.GENERATOR.get_state().numpy().tobytes()))

            arm = setting.arm(dataclasses.replace(recipe, before_micro_batch=(*recipe.before_micro_batch, see)), steps=1)
            take_step(arm, arm.workload.batch(torch.arange(16)))
            found[name] = len(set(seen))
        found["shared"] = [setting_of(workload=setting.config.workload, **format).masks_are_shared for format in ({}, F64)]
        found["shared_without"] = setting_of().masks_are_shared
    return found


def waits() -> dict[str, Any]:
    """Reads back to the host in one lock-step step of three arms."""
    found = {}
    for precision in (Precision.float32, Precision.float16):
        with device.entered(), deterministic(precision, device.DEVICE):
            setting = setting_of(precision=precision, clip_norm=1.0)
            recipes = {REFERENCE: full_batch(setting.config)}
            recipes |= {one.label: one.recipe for one in standard_candidates(setting.config)}
            lock = LockStep(setting.arms(recipes, steps=3, clip_norm=1.0), 0)
            ids = next(setting.windows())
            lock.step(ids, gradients="compared")
            device.READS.clear()
            lock.step(ids, gradients="compared")
            found[str(precision)] = sum(device.READS.values())
    return {**found, "arms": len(recipes)}


def training() -> dict[str, Any]:
    """Reads back to the host of one more step of a training: with float64 beside it seldom, and the noise scale in each step."""
    found = {}
    for steps in (2, 5):
        with device.entered(), deterministic(device=device.DEVICE):
            setting = setting_of(clip_norm=1.0, ema_decay=0.9, steps=steps, probe_every=1, referee_every=100)
            recipes = {REFERENCE: full_batch(setting.config)}
            recipes |= {one.label: one.recipe for one in standard_candidates(setting.config)}
            device.READS.clear()
            train(setting, recipes, null_recipes(setting.config), list(setting.windows()), lambda step, rows: None)
            found[steps] = sum(device.READS.values())
    return {"a_step": (found[5] - found[2]) / 3}


def every_fault() -> dict[str, Any]:
    """Two steps of each fault, in float32 and in float16: what is waited for in them beside what a right step waits for."""
    found: dict[str, Any] = {}
    for precision in (Precision.float32, Precision.float16):
        with device.entered(), deterministic(precision, device.DEVICE):
            setting = setting_of(precision=precision, clip_norm=1.0, optimizer=ADAMW)
            windows = list(setting.windows(2))
            right = Recipe(accumulation_steps=4, split=Even(4))
            for fault in (*catalogue.FAULTS, None):
                arm = setting.arm(right if fault is None else fault.apply(right), steps=2)
                seen = Watch(arm)
                device.IN_STEPS.clear()
                for ids in windows:
                    seen.start_window()
                    take_step(arm, arm.workload.batch(ids))
                assert all(p.device == device.DEVICE for p in arm.model.parameters())
                found[f"{fault.cause if fault else 'right'} {precision}"] = dict(device.IN_STEPS)
    usual = {str(precision): found[f"right {precision}"] for precision in (Precision.float32, Precision.float16)}
    return {"usual": usual, "more": {name: own for name, own in found.items() if own != usual[name.split()[1]]}}


def placed() -> dict[str, Any]:
    """Devices of the numbers of an optimizer's state, indices of its parameter groups, and what a file has kept."""
    with device.entered():
        arm = setting_of().arm(Recipe(accumulation_steps=1, split=Even(16)), steps=1)
        numbers = list(leaves([1.5, {"lr": 2, "step": torch.tensor(3.0)}], device.DEVICE))
        slices = [own for places in by_group(arm.model, arm.optimizer).values() for own in places]
        indices = [k for own in slices for k in range(own.start, own.stop)]
        weights = [p.detach() for p in arm.model.parameters()]
        back = [torch.zeros_like(one) for one in weights]
        Store().add(weights).put(back)
        return {
            "numbers": [float(torch.stack(numbers)[k]) for k in range(3)],
            "devices": sorted({str(one.device) for one in numbers}),
            "stored": all(torch.equal(own, one) for own, one in zip(back, weights, strict=True)),
            "indices": sorted(indices) == list(range(sum(p.numel() for p in arm.model.parameters()))),
        }


def captured() -> dict[str, Any]:
    """Whether capturing a model that draws, which runs it a few times, leaves the device's generator where it was."""

    def run_thrice(module: nn.Module, sample: tuple[Tensor], **_: Any) -> nn.Module:
        for _ in range(3):
            module(sample[0])
        drawn.append(not torch.equal(before, device.GENERATOR.get_state()))
        return module

    drawn: list[bool] = []
    with device.entered(), mock.patch.object(torch.cuda, "make_graphed_callables", run_thrice):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)).to(device.DEVICE)
        forward, before = Captured(model), device.GENERATOR.get_state()
        forward._capture(torch.ones(2, 6, device=device.DEVICE))
    return {"draws": drawn == [True], "kept": torch.equal(before, device.GENERATOR.get_state())}


def cached() -> dict[str, Any]:
    """Where the device's generator stands at each forward of a cached contrastive step, of the right recipe and of the fault."""
    found: dict[str, Any] = {}
    with device.entered(), deterministic(device=device.DEVICE):
        setting = setting_of(workload=dataclasses.replace(TOWERS, dropout=0.5))
        right = Recipe(accumulation_steps=4, split=Even(4))
        for recipe in (contrastive.grad_cache, contrastive.grad_cache_other_draws):
            arm, seen = setting.arm(recipe(right), steps=1), []
            arm.model.register_forward_pre_hook(lambda *_, seen=seen: seen.append(bytes(device.GENERATOR.get_state().tolist())))
            take_step(arm, arm.workload.batch(torch.arange(16)))
            found[recipe.__name__] = {"different": len(set(seen[:4])), "again": seen[:4] == seen[4:]}
    return found


def weighed() -> dict[str, Any]:
    """Whether what an earlier phase has left behind in a cycle is gone before the bytes of a step are counted."""
    with device.entered():
        arm = setting_of().arm(Recipe(accumulation_steps=2, split=Even(8)), steps=2)
        window = arm.workload.batch(torch.arange(16))
        gc.disable()
        try:
            cycle: list[Any] = [torch.zeros(10**6, device=device.DEVICE)]
            cycle.append(cycle)
            gone = weakref.ref(cycle[0])
            del cycle
            before = gone() is None
            memory.of_step(arm, window)
            return {"before": before, "after": gone() is None}
        finally:
            gc.enable()


def watched(divides: bool) -> dict[str, Any]:
    """A loop on the device under watch, replayed by a loss that draws: conclusion, generators, and reads of a later window."""

    def loop(watches: bool) -> tuple[Any, list[int], Tensor]:
        device.GENERATOR.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(16 * 12, 6, generator=generator).to(device.DEVICE)
        targets = torch.randint(3, (16 * 12,), generator=generator).to(device.DEVICE)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device.DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            model.drawn = torch.rand(3, device=device.DEVICE)  # as if there were dropout
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

        seen = watch(model, optimizer, loss=loss_of, every=10**6, tell=None)
        reads = []
        with seen if watches else contextlib.nullcontext():
            for window in torch.arange(16 * 12).split(16):
                before = sum(device.READS.values())
                for rows in window.split(4):
                    batch = inputs[rows], targets[rows]
                    if watches:
                        seen.batch(batch)
                    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
                    (loss / 4 if divides else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                reads.append(sum(device.READS.values()) - before)
        return seen.report() if watches else None, reads, device.GENERATOR.get_state()

    with device.entered():
        (report, reads, state), (_, _, alone) = loop(True), loop(False)
    assert report is not None
    return {
        "verdict": report.verdict,
        "causes": [str(cause) for cause in report.causes],
        "replayed": report.checked["replays"],
        "late_reads": reads[6:10],
        "generators_kept": torch.equal(state, alone),
    }


def no_kernel() -> dict[str, Any]:
    """An operation without a deterministic kernel, twice: named once, and its result is there; on the CPU's terms it raises."""
    with device.entered() as on:
        values = torch.arange(5.0, device=on)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with deterministic(device=on) as named:
                results = [float(values.kthvalue(2).values) for _ in range(2)]
        try:
            with deterministic():
                values.kthvalue(2)
            raised = ""
        except RuntimeError as error:
            raised = str(error)
    told = [str(one.message) for one in caught if one.category is NotReproducible]
    return {"named": list(named), "results": results, "told": told, "raised": raised}


def unsteady(relative: float) -> dict[str, Any]:
    """Verdicts where matrix products differ from run to run by that share of themselves."""
    with device.entered(), device.unsteady(relative):
        arms = run_trial(TrialConfig(**{**BASE, **SHORT}), lambda step, rows: None).arms
    return {"arms": [(row["arm"], row["verdict"], row["reasons"][:1]) for row in arms]}


def dropout() -> dict[str, Any]:
    """Where float64 draws other masks: errors beside it that a trial's rows have, by format."""
    found = {}
    for precision in (Precision.float32, Precision.float64):
        with device.entered():
            setting = setting_of(workload=WorkloadConfig(model=Model.mlp, width=2, dropout=0.5), precision=precision)
            errors: list[float] = []
            recipes = {REFERENCE: full_batch(setting.config)}

            def see(step: int, rows: list[Any], errors: list[float] = errors) -> None:
                errors += [row["gradient_error"] for row in rows if "gradient_error" in row]

            train(setting, recipes, null_recipes(setting.config), list(setting.windows(1)), see)
        found[str(precision)] = errors
    return found


def collected() -> dict[str, Any]:
    """Whether what an earlier phase has left behind in a cycle is gone when arms are made."""
    with device.entered():
        setting = setting_of()
        cycle: list[Any] = [torch.zeros(1000, device=device.DEVICE)]
        cycle.append(cycle)
        gone = weakref.ref(cycle[0])
        gc.disable()
        try:
            del cycle
            before = gone() is None
            setting.arms({REFERENCE: full_batch(setting.config)}, steps=1)
            return {"before": before, "after": gone() is None}
        finally:
            gc.enable()


IMAGES = (Data.digits, Data.ignored_labels, Data.policy, Data.pairs)
COPIED = {data: WorkloadConfig(data=data, model=Model.mlp, width=2) for data in IMAGES}
COPIED |= {Data.text: TEXT, Data.python_bytes: dataclasses.replace(TEXT, data=Data.python_bytes), Data.docstrings: TOWERS}


def copies() -> dict[str, Any]:
    """Copies from the host for which it waits, in one lock-step step, by workload; and waits before a clock is started."""
    found: dict[str, Any] = {}
    for data, workload in COPIED.items():
        with device.entered(), deterministic(device=device.DEVICE):
            setting = setting_of(workload=workload)
            recipes = {REFERENCE: full_batch(setting.config)}
            recipes |= {one.label: one.recipe for one in standard_candidates(setting.config)}
            lock = LockStep(setting.arms(recipes, steps=3), 0)
            ids = next(setting.windows())
            lock.step(ids, gradients="compared")
            device.WAITED.clear()
            lock.step(ids, gradients="compared")
            found[str(data)] = dict(device.WAITED)
            device.READS.clear()
            setting.exact.batch(ids)
            found[f"{data} reads"] = sum(device.READS.values())
    with device.entered():
        device.WAITED.clear()
        memory_and_time.measurements(setting_of(study="memory_and_time"), lambda step, rows: None)
    return {**found, "synchronised": device.WAITED["synchronize"]}


class Masked(nn.Module):
    """Dropout that is no layer: only the device's generator shows that it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, device=x.device) > 0.5)


def audited(divides: bool, dropout: float = 0.0, *, masked: bool = False) -> dict[str, Any]:
    """What `audit` says of a loop whose model and data are on the device."""

    def loop(batch_size: int, accumulation_steps: int) -> None:
        device.GENERATOR.manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            middle = (Masked(), Masked()) if masked else (nn.Dropout(dropout), nn.Dropout(dropout))
            layers = nn.Linear(6, 8), middle[0], nn.Tanh(), middle[1], nn.Linear(8, 3)
            inputs, targets = torch.randn(48, 6), torch.randint(3, (48,))
        model = nn.Sequential(*layers).to(device.DEVICE).train()
        inputs, targets = inputs.to(device.DEVICE), targets.to(device.DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for window in torch.arange(48).split(batch_size * accumulation_steps):
            optimizer.zero_grad()
            for ids in window.split(batch_size):
                loss = torch.nn.functional.cross_entropy(model(inputs[ids]), targets[ids])
                (loss / accumulation_steps if divides else loss).backward()
            optimizer.step()

    with (
        device.entered(),
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "get_rng_state_all", lambda: [device.GENERATOR.get_state()]),
    ):
        report = audit(loop, batch_size=16, accumulation_steps=[4])
    return {"equivalent": report.equivalent, "causes": sorted({str(one.cause) for one in report.findings})}


def two_devices() -> dict[str, Any]:
    """What the stand-in is for: a tensor of the CPU meets one of the device; and what is waited for."""

    def refused(compute: Callable[[], Any]) -> str:
        try:
            return f"not: {compute()}"
        except RuntimeError as error:
            return str(error)

    def counted(count: Any, compute: Callable[[], Any]) -> list[str]:
        count.clear()
        compute()
        return list(count)

    def put(a: Tensor) -> None:
        a[a > 0] = 1.0

    with device.entered() as on:
        a, b, mask = torch.ones(3, device=on), torch.ones(3), torch.ones(3, device=on) > 0
        found: dict[str, Any] = {
            "refused": refused(lambda: a + b),
            "sum_on_the_host": refused(lambda: torch.zeros(()).add_(a.sum())),
            "listed": refused(lambda: torch.stack([a.sum(), torch.zeros(())])),
            "number": float(a.sum() + torch.tensor(1.0)),
        }
        ways = (lambda: bool(a.sum() > 0), lambda: a[mask], lambda: put(a), lambda: a + 1)
        found["read"] = [counted(device.READS, way) for way in ways]
        host = torch.arange(2)
        ways = (lambda: a[host], lambda: host.to(on), lambda: a.copy_(b), lambda: host.to(on, non_blocking=True))
        found["waited"] = [counted(device.WAITED, way) for way in ways]
        device.IN_STEPS.clear()
        take_step(setting_of().arm(Recipe(accumulation_steps=1, split=Even(4), loop=lambda arm, window: bool(a.sum()))), b)
        found["in_a_step"] = dict(device.IN_STEPS)
        device.IN_STEPS.clear()
        return found


def by_hand(divides: bool) -> dict[str, Any]:
    """`judge_loop` of the loop everybody writes, with the division and without."""

    def loop(arm: Arm, window: Batch) -> Tensor:
        arm.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=arm.device)
        num = arm.workload.num_terms(window).sum()
        for rows in torch.arange(len(window)).chunk(4):
            part = window.rows(rows)
            loss = arm.workload.losses(arm.model(part.inputs), part).sum() / (num if divides else num / 4)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        arm.optimizer.step()
        arm.schedule.step()
        return total

    with device.entered():
        row = judge_loop(TrialConfig(**BASE), loop)
    return {"verdict": row["verdict"], "cause": row["cause"], "reasons": row["reasons"]}


def example(file: str, name: str, args: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A trial of a task in `examples/`."""
    target = str(Path(__file__).parents[2] / "examples" / f"{file}.py") + f":{name}"
    workload = WorkloadConfig(data=Data.custom, target=target, args=args or {})
    config = TrialConfig(**{**BASE, "workload": workload, "norm": Norm.as_is, **changes, **SHORT})
    with device.entered():
        record = studies.run(config, lambda step, rows: None)
    return {"arms": [(row["arm"], row["verdict"], row["cause"], row["explained"]) for row in record["arms"]]}


LION = OptimizerConfig(
    name=OptimizerName.custom, target=str(Path(__file__).parents[2] / "examples" / "images.py") + ":Lion", lr=3e-4
)
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "planner": planner,
    "masks": masks,
    "waits": waits,
    "no_kernel": no_kernel,
    "two_devices": two_devices,
    "dropout": dropout,
    "collected": collected,
    "copies": copies,
    "training": training,
    "every_fault": every_fault,
    "placed": placed,
    "cached": cached,
    "captured": captured,
    "weighed": weighed,
    "unsteady": partial(unsteady, 1e-6),
    "steady": partial(unsteady, 1e-15),
    "audit_right": partial(audited, True),
    "audit_undivided": partial(audited, False),
    "audit_dropout": partial(audited, True, 0.5),
    "audit_masks": partial(audited, True, masked=True),
    "watched_right": partial(watched, True),
    "watched_undivided": partial(watched, False),
    "by_hand": partial(by_hand, True),
    "by_hand_undivided": partial(by_hand, False),
    "example_language_model": partial(
        example, "language_model", "Lines", {"width": 8, "layers": 1, "samples": 96}, effective_batch=8
    ),
    "example_images": partial(example, "images", "Digits", norm=Norm.group, optimizer=LION),
    "example_coupled_loss": partial(example, "coupled_loss", "Embeddings"),
    "example_my_sweep": partial(example, "my_sweep/task", "MyTask", norm=Norm.group),
    **{name: partial(trial, name) for name in TRIALS},
}


def main(names: list[str]) -> None:
    """Run the cases; what fails is told with its last lines."""
    torch.set_num_threads(1)
    for name in names or list(CASES):
        for count in (device.READS, device.WAITED, device.IN_STEPS):
            count.clear()
        started = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = CASES[name]()
        except Exception as error:
            told = traceback.format_exc().strip().splitlines()
            found = {"error": f"{type(error).__name__}: {error}", "trace": told[-14:]}
        found |= {"reads": sum(device.READS.values()), "moved": device.READS["_to_copy"] + device.READS["copy_"]}
        found |= {"in_steps": dict(device.IN_STEPS)}
        found |= {"case": name, "seconds": round(time.monotonic() - started, 2)}
        print(json.dumps(found, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
