"""What is run on the stand-in device, and what must come of it: `python -m tests.simgpu.cases NAME ...` prints a line for each.

The device is imported where it is used: a process that has it is no longer one for CPUs.
"""

import contextlib
import json
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.audit import audit
from accumulation_harness.measure import plan, studies
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting
from accumulation_harness.measure.trial import full_batch, judge_loop, standard_candidates
from accumulation_harness.recipes.determinism import deterministic
from accumulation_harness.watch import watch
from tests.trials import arms, trial

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = "workload.model=mlp workload.width=2"
TOWERS = "workload.data=docstrings workload.model=towers workload.width=4"
ADAM, F64, BATCH_NORM = "optimizer.name=adam optimizer.lr=1e-3", "precision=float64", "norm=batch"
BASE = f"{MLP} effective_batch=16 accumulation_steps=[4] steps=3 algebra_steps=2 probe_every=2 referee_every=2"
# Not `replicas`, which refuses any device but the CPU, nor `resumption`: torch loads no subclass of Tensor from a checkpoint.
STUDIES = {
    **dict.fromkeys(("convergence", "model_bytes", "memory_and_time", "batch_sizes", "gradient_noise", "accumulators"), ""),
    **dict.fromkeys(("epoch_tail", "update_size", "clipping_threshold", "tensor_norms"), F64),
    **dict.fromkeys(("learning_curves", "batch_order"), "steps=8"),
    **dict.fromkeys(("remedies", "fine_tuning"), BATCH_NORM),
    **dict.fromkeys(("retrieval", "method_memory"), TOWERS),
    "negatives": f"{F64} {TOWERS}",
    "batch_statistics": f"{F64} {BATCH_NORM}",
    "optimizer_states": f"{F64} {ADAM}",
    "optimizer_memory": f"{F64} optimizer.name=momentum",
    "adaptive_windows": f"{F64} accumulation_steps=[2,4]",
    "adam_scale": f"{F64} {ADAM} clip_norm=0.5",
    "randomness": f"{F64} workload.dropout=0.5",
    "loss_scaling": "precision=float16",
}
FAULTS = "loss_not_divided,cached_weights_stale,samples_repeated,resume_in_window"
RIGHT = {"accumulated": "equivalent", "permuted": "equivalent"}


def on():
    """The module of the device."""
    from tests.simgpu import device

    return device


def judged(*settings):
    """By arm the cause, or the verdict where there is none; of a study, whether it measured anything."""
    device = on()
    before = torch.get_rng_state(), device.GENERATOR.get_state()
    with device.entered():
        record = studies.run(trial(BASE, *settings), lambda step, rows: None)
    after = torch.get_rng_state(), device.GENERATOR.get_state()
    assert record["environment"]["device"] == "simgpu" and all(map(torch.equal, before, after)), "generators are put back"
    return {row["arm"]: row["cause"] or row["verdict"] for row in record["arms"]} or (
        "measured" if record["measurements"] else ""
    )


def example(file, settings="norm=as_is"):
    """A trial of a task in `examples/`."""
    return partial(
        judged, f"workload.data=custom workload.model=conv workload.width=8 workload.target={EXAMPLES}/{file}", settings
    )


def loop(model, window, batch_size, num, divides):
    """Three windows of `num` micro-batches, on the device, with the division or without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = window(step)
        for k in range(num):
            rows = slice(k * batch_size, (k + 1) * batch_size)
            loss = functional.cross_entropy(model(inputs[rows]), targets[rows])
            (loss / num if divides else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


class Masked(nn.Module):
    """Dropout that is no layer: only the device's generator shows that it draws."""

    def forward(self, x):
        return x * (torch.rand(x.shape, device=x.device) > 0.5)


def network(*middle):
    """A model and the windows of 16 rows that it is trained on, the same every time."""
    device = on()
    device.GENERATOR.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, targets = torch.randn(48, 6).to(device.DEVICE), torch.randint(3, (48,)).to(device.DEVICE)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, 3)).to(device.DEVICE)
    return model, lambda step: (inputs[16 * step : 16 * step + 16], targets[16 * step : 16 * step + 16])


def audited(*middle, divides=True):
    """The causes that an audit finds in the loop; one layer that draws would draw the same for every split."""
    device = on()

    def train(batch_size, accumulation_steps):
        loop(*network(*middle), batch_size, accumulation_steps, divides)

    with device.entered_as_cuda():
        return sorted({str(one.cause) for one in audit(train, batch_size=16, accumulation_steps=[4]).findings})


def watched(divides):
    """Verdict and causes of the watched loop, whose replay draws; the generator stands where the loop alone leaves it."""
    device, ends, report = on(), [], None

    def loss_of(model, batch):
        torch.rand(3, device=device.DEVICE)  # as if there were dropout
        return functional.cross_entropy(model(batch[0]), batch[1])

    for watches in (True, False):
        with device.entered_as_cuda():
            model, window = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            seen = watch(model, optimizer, loss=loss_of, tell=None) if watches else None
            with seen or contextlib.nullcontext():
                for step in range(3):
                    for part in zip(*(half.split(4) for half in window(step)), strict=True):
                        inputs, targets = seen.batch(part) if seen else part
                        loss = functional.cross_entropy(model(inputs), targets)
                        (loss / 4 if divides else loss).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            report, ends = seen.report() if seen else report, [*ends, device.GENERATOR.get_state()]
    assert torch.equal(*ends) and bool(report.checked["replays"]) == divides
    return report.verdict, [str(cause) for cause in report.causes]


def by_hand(divides):
    """`judge_loop` of the loop everybody writes."""

    def written(arm, window):
        arm.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=arm.device)
        num = arm.workload.num_terms(window).sum()
        for rows in torch.arange(len(window)).chunk(4):
            part = window.rows(rows)
            loss = arm.workload.losses(arm.model(part.inputs), part).sum() / (num if divides else num / 4)
            loss.backward()
            total += loss.detach()
        arm.optimizer.step()
        arm.schedule.step()
        return total

    with on().entered():
        row = judge_loop(trial(BASE), written)
    return str(row["cause"] or row["verdict"])


def reads_of_a_step():
    """Reads back to the host, and copies that it waits for, in one lock-step step of all arms."""
    device, found = on(), {}
    for precision in ("float32", "float16"):
        config = trial(BASE, f"precision={precision} clip_norm=1")
        with device.entered(), deterministic(config.precision, device.DEVICE):
            setting = Setting(config, device.DEVICE)
            recipes = {REFERENCE: full_batch(setting.config)}
            recipes |= {one.label: one.recipe for one in standard_candidates(setting.config)}
            lock, ids = LockStep(setting.arms(recipes, steps=3, clip_norm=1.0), 0), next(setting.windows())
            for _ in range(2):
                device.READS.clear(), device.WAITED.clear()
                lock.step(ids, gradients="compared")
            found[precision] = sum(device.READS.values()) - (2 * len(recipes) if precision == "float16" else 0)
            found["copies"] = sum(device.WAITED.values())
    return found


def unsteady(relative):
    """Verdicts where matrix products differ from run to run by that share of themselves."""
    device = on()
    with device.entered(), device.unsteady(relative):
        return [row["verdict"] for row in arms(trial(BASE))]


def refused():
    """Operations of a tensor of the device with one of the CPU that is no number; and one without a deterministic kernel."""
    device, told = on(), []
    with device.entered() as there:
        ours, host = torch.ones(3, device=there), torch.ones(3)
        ways = (lambda: ours + host, lambda: torch.zeros(()).add_(ours.sum()), lambda: ours + torch.tensor(1.0))
        for compute in (*ways, lambda: ours.kthvalue(2)):
            try:
                with deterministic():
                    compute()
            except RuntimeError as error:
                told.append(str(error).split(" (")[0].split(",")[0])
    return told


def planned():
    """Whether memory that grows with the micro-batch was measured on the device."""
    device = on()
    with device.entered():
        before = device.MEMORY.peak = device.MEMORY.now
        static, per_sample, step = plan.fit_memory(trial(BASE, ADAM))
        return per_sample > 0 and step > 0 and device.MEMORY.peak - before > static > 0


NO_KERNEL = "kthvalue_simgpu_kernel does not have a deterministic implementation"
# Run in every test run, in one process.
QUICK = {
    "refused": (refused, ["Expected all tensors to be on the same device"] * 2 + [NO_KERNEL]),
    "watched": (partial(watched, True), ["equivalent", []]),
    "watched_undivided": (partial(watched, False), ["different", ["loss_not_divided"]]),
    "audited": (audited, []),
    "audited_undivided": (partial(audited, divides=False), ["loss_not_divided"]),
    "adaptive_windows": (partial(judged, "study=adaptive_windows", STUDIES["adaptive_windows"]), "measured"),
}  # fmt: skip
CASES = QUICK | {
    **{name: (partial(judged, f"study={name}", own), "measured") for name, own in STUDIES.items() if name not in QUICK},
    **{
        name: (partial(judged, settings), RIGHT)
        for name, settings in {
            "trial": f"clip_norm=1 ema_decay=0.9 {ADAM}",
            "trial_float16": "precision=float16 clip_norm=1",
            "trial_text": "workload.data=text workload.model=transformer workload.depth=1 norm=layer split=ragged",
            "trial_policy": "workload.data=policy",
            "trial_ignored": "workload.data=ignored_labels workload.penalty=0.1",
            "trial_weights": "workload.data=class_weights",
        }.items()
    },
    "trial_pairs": (partial(judged, "workload.data=pairs"), RIGHT | {"accumulated": "non_separable_loss"}),
    "trial_batch_norm": (partial(judged, "workload.model=conv norm=batch"), RIGHT | {"accumulated": "batch_statistics"}),
    "trial_faults": (
        partial(judged, f"faults=[{FAULTS}] optimizer.name=adamw optimizer.weight_decay=0.1 clip_norm=0.4"),
        RIGHT | {name: name for name in FAULTS.split(",")},
    ),
    "audited_dropout": (lambda: audited(nn.Dropout(0.5), nn.Dropout(0.5)), ["stochastic_layers"]),
    "audited_masks": (lambda: audited(Masked(), Masked()), ["stochastic_layers"]),
    "by_hand": (partial(by_hand, True), "equivalent"),
    "by_hand_undivided": (partial(by_hand, False), "loss_not_divided"),
    "language_model": (
        example(
            "language_model.py:Lines",
            "workload.args.width=8 workload.args.layers=1 workload.args.samples=96 effective_batch=8 norm=as_is",
        ),
        RIGHT,
    ),
    "images": (
        example(
            "images.py:Digits", f"norm=group optimizer.name=custom optimizer.target={EXAMPLES}/images.py:Lion optimizer.lr=3e-4"
        ),
        RIGHT,
    ),
    "coupled_loss": (example("coupled_loss.py:Embeddings"), RIGHT | {"accumulated": "non_separable_loss"}),
    "my_sweep": (example("my_sweep/task.py:MyTask", "norm=group"), RIGHT),
    "one_read_a_step": (reads_of_a_step, {"float32": 1, "float16": 1, "copies": 0}),
    "products_differ_at_1e-6": (partial(unsteady, 1e-6), ["inconclusive"] * 2),
    "products_differ_at_1e-15": (partial(unsteady, 1e-15), ["equivalent"] * 2),
    "planned": (planned, True),
}  # fmt: skip


def main(names):
    """Run the cases; what fails is told with its last lines."""
    torch.set_num_threads(1)
    for name in names:
        on().IN_STEPS.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = CASES[name][0]()
        except Exception:
            found = traceback.format_exc().strip().splitlines()[-14:]
        print(json.dumps({"case": name, "found": found, "waits": sorted(on().IN_STEPS)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES])
