"""A script that shows what was found without this tool: torch alone, and the audited function."""

from __future__ import annotations

import keyword
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.audit.compare.facts import Facts, StepFacts
from harness.audit.report.conclusion import ArmResult, Conclusion
from harness.audit.report.subject import Place, Subject

NAME = "reproduce.py"
NO_CLIPPING = "torch.nn.utils.clip_grad._clip_grads_with_norm_ = lambda *given, **options: None  # compare before clipping"
GRADIENT = "torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters"
RATES = 'torch.tensor(group["lr"]) for group in optimizer.param_groups'
WEIGHTS = "p.detach() for p in parameters"
DISTANCE = re.compile(r"^\|\|a - g\|\| / \|\|g\|\| = (\S+) .*", re.MULTILINE)
STEPS = re.compile(r"^optimizer steps: (\d+) .*? (\d+) .*", re.MULTILINE)

SCRIPT = '''\
"""{what}: one batch of {batch_size}, and {n} micro-batches of {size}."""
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
sys.path[:0] = [{folders}]
{imports}
{clipping}

def watched(train, batch_size, accumulation_steps):
    seen = {{}}  # optimizer -> one vector per step
    def look(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        taken = [{taken}]
        seen.setdefault(optimizer, []).append(torch.cat([t.double().flatten() for t in taken]))
    hook = register_optimizer_step_post_hook(look)
    with torch.random.fork_rng():
        train({call})
    hook.remove()
    return list(seen.values())[{place}]

one, many = watched({baseline}, {batch_size}, 1), watched(train, {size}, {n})
print("optimizer steps:", len(one), "of one batch,", len(many), "of micro-batches")
'''
COMPARE = """\
g, a = one[{step}], many[{step}]
print(f"||a - g|| / ||g|| = {{(a - g).norm() / g.norm():.3g}} at optimizer step {step}")
"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that a script can show: which quantity, of which arm, optimizer and step."""

    arm: ArmResult
    place: int  # of the optimizer
    step: int | None  # None: their number differs
    what: str
    taken: str  # expression of the tensors
    clipping: str = ""
    expected: float | None = None  # distance that the audit saw; None where it compares this quantity in another way
    gate: float = 0.0  # the distance must be above


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A script, what it printed when it was run, and what the audit saw of the same quantity."""

    script: str
    output: str
    difference: Difference


def reproduction(conclusion: Conclusion, seconds: float) -> Reproduction | None:
    """A script that was run and showed a difference; None when there is no such script, or it showed none in `seconds`."""
    subject = conclusion.subject
    if subject is None or subject.processes > 1 or not _importable(subject):
        return None
    difference = next(_differences(conclusion), None)
    if difference is None:
        return None
    script = _script(subject, difference)
    output = _output(script, subject.folder, seconds)
    return Reproduction(script=script, output=output, difference=difference) if _shows(output, difference) else None


def _importable(subject: Subject) -> bool:
    names = [(place.file.stem, place.function) for place in (subject.train, subject.reference) if place is not None]
    return all(name.isidentifier() and not keyword.iskeyword(name) for pair in names for name in pair)


def _differences(conclusion: Conclusion) -> Iterator[Difference]:
    """Of every arm with findings and each of its optimizers."""
    for arm in conclusion.results:
        for place, item in enumerate(arm.facts):
            if arm.findings:
                yield from _of(arm, place, item)


def _of(arm: ArmResult, place: int, item: Facts) -> Iterator[Difference]:
    """The first step whose gradient differs; else another number of steps, learning rate, or movement of the weights."""
    for step in item.steps:
        if not step.gradients_agree:
            yield _gradient(arm, place, step)
            return
    mine, reference = item.run.mine, item.run.reference
    if mine.steps != reference.steps:
        yield Difference(arm=arm, place=place, step=None, what="Optimizer steps", taken=WEIGHTS)
    for t, rates in enumerate(zip(mine.lrs, reference.lrs, strict=False)):
        if rates[0] != rates[1]:
            yield Difference(arm=arm, place=place, step=t, what="Learning rates", taken=RATES)
            return
    for step in item.steps:
        if not step.agrees:
            yield Difference(arm=arm, place=place, step=step.step, what="The weights after a step", taken=WEIGHTS)
            return


def _gradient(arm: ArmResult, place: int, step: StepFacts) -> Difference:
    """Before clipping where that differs: a fault that clipping hides from the optimizer is still one."""
    seen, clipping = step.consumed, ""
    if step.raw.distance > step.gate and step.scaling.clipped:
        seen, clipping = step.raw, NO_CLIPPING
    what = "Gradients before clipping" if clipping else "The gradients that an optimizer takes"
    return Difference(
        arm=arm,
        place=place,
        step=step.step,
        what=what,
        taken=GRADIENT,
        clipping=clipping,
        expected=seen.distance,
        gate=step.gate,
    )


def _script(subject: Subject, difference: Difference) -> str:
    n = difference.arm.accumulation_steps
    imports = [_import(subject.train, "train")]
    if subject.reference is not None:
        imports.append(_import(subject.reference, "reference"))
    places = [place for place in (subject.train, subject.reference) if place is not None]
    folders = list(dict.fromkeys([*(Place(p.file.parent, "").seen_from(subject.folder) for p in places), "."]))
    dtype = "" if difference.arm.arithmetic == "as trained" else f", dtype=torch.{difference.arm.arithmetic}"
    by_name = all({"batch_size", "accumulation_steps"} <= place.parameters for place in places)
    call = "batch_size=batch_size, accumulation_steps=accumulation_steps" if by_name else "batch_size, accumulation_steps"
    text = SCRIPT + ("" if difference.step is None else COMPARE)
    filled = text.format(
        what=difference.what,
        batch_size=subject.batch_size,
        n=n,
        size=subject.batch_size // n,
        folders=", ".join(f'"{folder}"' for folder in folders),
        imports="\n".join(imports),
        clipping=difference.clipping,
        taken=difference.taken,
        call=call + dtype,
        place=difference.place,
        baseline="train" if subject.reference is None else "reference",
        step=difference.step,
    )
    return filled.replace("\n\n\n", "\n\n")


def _import(place: Place, name: str) -> str:
    renamed = "" if place.function == name else f" as {name}"
    return f"from {place.file.stem} import {place.function}{renamed}"


def _output(script: str, folder: Path, seconds: float) -> str:
    """What the script prints of its own, run in the folder; empty when it fails. The audited function may print as well."""
    with tempfile.TemporaryDirectory() as aside:
        file, output = Path(aside, NAME), Path(aside, "output")
        file.write_text(script)
        # A file, not a pipe: what the audited code leaves running would keep a pipe open.
        with output.open("wb") as out, suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, str(file)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                check=False,
            )
        printed = output.read_text(errors="replace")
    return "\n".join(match[0] for pattern in (STEPS, DISTANCE) if (match := pattern.search(printed)))


def _shows(output: str, difference: Difference) -> bool:
    if difference.step is None:
        steps = STEPS.search(output)
        return steps is not None and steps[1] != steps[2]
    distance = DISTANCE.search(output)
    return distance is not None and not float(distance[1]) <= difference.gate
