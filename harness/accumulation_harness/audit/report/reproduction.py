"""A script that shows what was found without this tool: torch alone, and the audited function."""

from __future__ import annotations

import keyword
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accumulation_harness.audit.compare.run import Facts
from accumulation_harness.audit.report.conclusion import ArmResult, Conclusion
from accumulation_harness.audit.report.subject import Place, Subject
from accumulation_harness.compare.linear import distance
from accumulation_harness.system.processes import module_command

NAME = "reproduce.py"
SAME_RATE = 1e-6  # relative distance of learning rates
SAME = 0.01  # relative difference of two distances that are called the same
NO_CLIPPING = "torch.nn.utils.clip_grad._clip_grads_with_norm_ = lambda *given, **options: None  # compare before clipping"
GRADIENTS = "torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in weights(optimizer)"
RATES = 'torch.tensor(group["lr"]) for group in optimizer.param_groups'
MOVEMENTS = "p.detach() - old for p, old in zip(weights(optimizer), before[optimizer])"
BEFORE = """\
before = {}
register_optimizer_step_pre_hook(lambda o, *given: before.update({o: [p.detach().clone() for p in weights(o)]}))"""
HOOKS = ("register_optimizer_step_post_hook", "register_optimizer_step_pre_hook")
DISTANCE = re.compile(r"^[a-z ]+: \|\|a - g\|\| / \|\|g\|\| = (\S+) .*", re.MULTILINE)
STEPS = re.compile(r"^optimizer steps: (\d+) .*? (\d+) .*", re.MULTILINE)

SCRIPT = '''\
"""Compare {what}: one batch of {batch_size}, and {n} micro-batches of {size}."""
import sys
import torch
from torch.optim.optimizer import {hooks}
sys.path[:0] = [{folders}]
{imports}

def weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]
{preparation}
def watched(train, batch_size, accumulation_steps):
    seen = {{}}  # optimizer -> one vector per step
    def look(optimizer, args, kwargs):
        taken = [{taken}]
        seen.setdefault(optimizer, []).append(torch.cat([t.double().flatten() for t in taken]))
    hook = register_optimizer_step_post_hook(look)
    with torch.random.fork_rng():
        train({call})
    hook.remove()
    return list(seen.values())[{place}]
g, a = watched({baseline}, {batch_size}, 1), watched(train, {size}, {n})
print("optimizer steps:", len(g), "of one batch,", len(a), "of micro-batches")
'''
COMPARE = """\
print(f"{what}: ||a - g|| / ||g|| = {{(a[{step}] - g[{step}]).norm() / g[{step}].norm():.3g}} at optimizer step {step}")
"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that a script can show: which quantity, of which arm, optimizer and step."""

    arm: ArmResult
    place: int  # of the optimizer
    step: int | None  # None: their number differs
    what: str  # plural, lower case
    taken: str  # expression of the tensors
    preparation: str  # lines before the function that watches
    expected: float  # distance that the audit saw
    gate: float  # the largest that rounding explains


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A script, what it printed when it was run, and what the audit saw of the same quantity."""

    script: str
    output: str
    difference: Difference

    @property
    def agrees(self) -> bool:
        """Whether the script shows the distance that the audit saw."""
        if self.difference.step is None:
            return True
        shown, expected = _distance(self.output), self.difference.expected
        return shown == expected or abs(shown - expected) <= SAME * abs(expected)


def reproduction(conclusion: Conclusion, seconds: float) -> Reproduction | None:
    """The first script that was run and showed a difference; None when none did. All of them together may take `seconds`.

    Args:
        conclusion: What the audit concluded.
        seconds: Time for all attempts together.

    Returns:
        The script with its output, or None.
    """
    subject, begun = conclusion.subject, time.monotonic()
    if subject is None or not is_tried(subject):
        return None
    for difference in _differences(conclusion):
        left = seconds - (time.monotonic() - begun)
        if left <= 0:
            break
        script = _script(subject, difference)
        output = _output(script, subject.folder, left)
        if _shows(output, difference):
            return Reproduction(script=script, output=output, difference=difference)
    return None


def is_tried(subject: Subject) -> bool:
    """Whether it is a function that a script can import and call, in one process.

    Args:
        subject: What was audited.

    Returns:
        True for a function of one process without settings.
    """
    if subject.processes > 1 or subject.settings:
        return False
    names = [(place.file.stem, place.function) for place in (subject.train, subject.reference) if place is not None]
    return all(name.isidentifier() and not keyword.iskeyword(name) for pair in names for name in pair)


def _differences(conclusion: Conclusion) -> Iterator[Difference]:
    """Of every arm with findings and each of its optimizers, the first step at which a quantity differs."""
    for arm in conclusion.results:
        for place, item in enumerate(arm.facts if arm.findings else ()):
            for what, taken, preparation, seen in _quantities(item):
                if first := next((one for one in seen if not one[1] <= one[2]), None):
                    step, expected, gate = first
                    yield Difference(
                        arm=arm,
                        place=place,
                        step=step,
                        what=what,
                        taken=taken,
                        preparation=preparation,
                        expected=expected,
                        gate=gate,
                    )


def _quantities(item: Facts) -> Iterator[tuple[str, str, str, Sequence[tuple[int | None, float, float]]]]:
    """What is compared, how a script takes it, what it prepares, and the step, distance and gate of each comparison."""
    mine, reference = item.run.mine, item.run.reference
    yield "gradients", GRADIENTS, "", [(s.step, s.consumed.distance, s.gate) for s in item.steps]
    unclipped = [(s.step, s.raw.distance, s.gate) for s in item.steps if s.clipped]
    yield "gradients without clipping", GRADIENTS, NO_CLIPPING, unclipped
    yield "numbers of optimizer steps", GRADIENTS, "", [(None, math.nan, 0.0)] if mine.steps != reference.steps else []
    rates = [distance(np.array(a), np.array(b)) for a, b in zip(mine.lrs, reference.lrs, strict=False)]
    farthest = max(range(len(rates)), key=rates.__getitem__, default=None)
    yield "learning rates", RATES, "", [] if farthest is None else [(farthest, rates[farthest], SAME_RATE)]
    yield "movements of the weights", MOVEMENTS, BEFORE, [(s.step, s.update.distance, s.update.gate) for s in item.steps]


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
    return (SCRIPT + ("" if difference.step is None else COMPARE)).format(
        what=difference.what,
        batch_size=subject.batch_size,
        n=n,
        size=subject.batch_size // n,
        folders=", ".join(f'"{folder}"' for folder in folders),
        imports="\n".join(imports),
        preparation=difference.preparation,
        hooks=", ".join(hook for hook in HOOKS if f"{hook}(" in SCRIPT + difference.preparation),
        taken=difference.taken,
        call=call + dtype,
        place=difference.place,
        baseline="train" if subject.reference is None else "reference",
        step=difference.step,
    )


def _import(place: Place, name: str) -> str:
    renamed = "" if place.function == name else f" as {name}"
    return f"from {place.file.stem} import {place.function}{renamed}"


def _output(script: str, folder: Path, seconds: float) -> str:
    """What the script prints of its own, run in an image of the folder; empty when it fails. The function may print as well."""
    with tempfile.TemporaryDirectory() as aside:
        file, output = Path(aside, NAME), Path(aside, "output")
        file.write_text(script)
        # A file, not a pipe: what the audited code leaves running would keep a pipe open.
        with output.open("wb") as out, suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [*module_command("accumulation_harness.audit.user_code.aside"), str(file)],
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
    return not _distance(output) <= difference.gate


def _distance(output: str) -> float:
    """That the script printed; 0 without one."""
    found = DISTANCE.search(output)
    return float(found[1]) if found else 0.0
