"""`accumulation-harness plan workload=digits memory=24GB effective_batch=512`: the (b, N) to use, and why.

Memory is M = max(M_s + a b, M_step): while micro-batches are computed, and while the optimizer steps, whose temporaries a GPU's
allocator counts. They are measured on the model itself at two small micro-batches (`memory.of_step`), and the largest b whose M
fits the budget is kept; B = N b stays what it is, so only divisors of B are asked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import psutil
import torch

from accumulation_harness.config import ConfigError, LastWindow, TrialConfig
from accumulation_harness.config.compose import BadInput, compose_trial
from accumulation_harness.measure import memory
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe
from accumulation_harness.system import accelerator
from accumulation_harness.system.processes import NoAnswer, answered, run_command
from accumulation_harness.system.terminal import one_line

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MARGIN = 0.05  # of the budget that stays free: temporaries inside operations are not counted on a CPU
USAGE = """\
accumulation-harness plan memory=24GB effective_batch=512 [any setting of a trial, as workload=text norm=layer]
       accumulation-harness plan trial [memory=what is free] [any setting of a trial]"""
TRIAL = "trial"


@dataclass(frozen=True)
class Plan:
    """N micro-batches of b samples, and the bytes that they are expected to take."""

    micro_batch: int
    accumulation_steps: int
    static: float  # M_s
    per_sample: float  # a
    step: float = 0  # M_step: while the optimizer steps, when the activations are gone

    @property
    def total(self) -> float:
        """M in bytes."""
        return max(self.static + self.per_sample * self.micro_batch, self.step)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, or what is wrong with the arguments; the exit code is 0 or 2.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0, or 2 for bad input.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    budgets = [text.removeprefix("memory=") for text in given if text.startswith("memory=")]
    asks = bool({"-h", "--help"} & set(given))
    if TRIAL in given[:1] and not asks:
        return _of_trial([text for text in given[1:] if not text.startswith("memory=")], budgets)
    if len(budgets) != 1 or asks:
        print(f"usage: {USAGE}", file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2

    def planned(config: TrialConfig) -> Iterable[str]:
        return answered(_explain, config, parse_bytes(budgets[0]))

    return print_about([text for text in given if not text.startswith("memory=")], planned)


def _of_trial(settings: Sequence[str], budgets: Sequence[str]) -> int:
    """`plan trial`, whose modules import this one."""
    from accumulation_harness.measure.plan_trial import explain as explained

    def planned(config: TrialConfig) -> Iterable[str]:
        budget = parse_bytes(budgets[-1]) if budgets else free_bytes(choose_device(config.device))
        return answered(explained, config, budget)

    return print_about(settings, planned, asks_numbers=False)


def print_about(settings: Sequence[str], answer: Callable[[TrialConfig], Iterable[str]], *, asks_numbers: bool = True) -> int:
    """Print the answer to a question about a trial, or what is wrong with the settings.

    Args:
        settings: The settings of a trial, as on the command line.
        answer: Returns the lines for a configuration.
        asks_numbers: Whether N is what is asked, and none is configured.

    Returns:
        The exit code: 0, 1 if the model cannot be tried, 2 if a setting is wrong.
    """
    try:
        config = compose_trial([*settings, *(["accumulation_steps=[1]"] if asks_numbers else [])]).trial
        for line in answer(config):
            print(line)
    except (BadInput, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except NoAnswer as error:
        print(f"{config.workload.label}: expected a model that can be tried; {error}", file=sys.stderr)
        return 1
    return 0


def parse_bytes(text: str) -> int:
    """Parse a number of bytes with its unit.

    >>> parse_bytes("24GB"), parse_bytes("1.5 GiB"), parse_bytes("800")
    (24000000000, 1610612736, 800)

    Args:
        text: The number, with an optional unit.

    Returns:
        The number, in bytes.

    Raises:
        ConfigError: It is something else.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError("memory", text, "a number of bytes of up to 18 digits, as 24GB or 800MiB")
    return round(float(found[1]) * UNITS[found[2].upper()])


def fit_memory(config: TrialConfig) -> tuple[float, float, int]:
    """Measure the memory model of a training at two sizes of micro-batches.

    The sizes are 8 and 16 samples, or fewer where so many do not fit into what is free. All windows accumulate, because the
    gradients of a later micro-batch need memory besides those that are there already.

    Args:
        config: The trial.

    Returns:
        M_s, a and M_step in bytes, as in `choose`.

    Raises:
        ConfigError: The batch has too few samples to measure two sizes.
    """
    device = choose_device(config.device)
    with deterministic(config.precision, device):
        setting = Setting(config, device)
        least = setting.exact.smallest_micro_batch
        most = min(config.effective_batch, setting.exact.num_samples, 16)
        if most < 2 * least:
            raise ConfigError("effective_batch", config.effective_batch, f"{2 * least} samples or more, to measure at two sizes")

        def fitted(size: int) -> tuple[float, float, int]:
            """From micro-batches of `size` and of half of it."""
            [ids] = setting.windows(1, size=size, last=LastWindow.drop)
            taken = []
            for b in (size // 2, size):
                arm = setting.arm(Recipe(accumulation_steps=2 * size // b, split=Even(b)), steps=1)
                taken.append(memory.of_step(arm, arm.workload.batch(torch.cat([ids, ids]))))
            return *memory.fit((size // 2, size), [one.micro_batches for one in taken]), max(one.step for one in taken)

        static, per_sample, step = fitted(2 * least)
        fits = [b for b in (16, 8, 4) if 2 * least < b <= most and static + per_sample * b <= room(free_bytes(device))]
        return fitted(fits[0]) if fits else (static, per_sample, step)


def free_bytes(device: torch.device) -> int:
    """Ask how much memory is free.

    Args:
        device: A CPU or a CUDA device.

    Returns:
        Bytes: of a GPU what its driver says is free, of a CPU what the system could give without swapping.
    """
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free: int = accelerator.module(device).mem_get_info(device)[0]
    return free


def room(budget: float) -> float:
    """Keep a margin of the memory free.

    Args:
        budget: Bytes.

    Returns:
        The bytes of it that may be used: budget * (1 - `MARGIN`).
    """
    return budget * (1 - MARGIN)


def choose(effective_batch: int, budget: float, static: float, per_sample: float, step: float = 0) -> Plan:
    """Choose the largest micro-batch that fits a memory budget.

    The model is M(b) = max(M_s + a b, M_step).

    Args:
        effective_batch: B.
        budget: Bytes, of which the share MARGIN stays free.
        static: M_s, bytes that do not depend on b.
        per_sample: a, bytes per sample of a micro-batch.
        step: M_step, bytes while the optimizer steps.

    Returns:
        The plan with the largest divisor b of B that fits.

    Raises:
        ConfigError: Not even b = 1 fits.
    """
    divisors = [b for b in range(1, effective_batch + 1) if effective_batch % b == 0]
    plans = [Plan(b, effective_batch // b, static, per_sample, step) for b in divisors]
    fitting = [plan for plan in plans if plan.total <= room(budget)]
    if not fitting:
        needed = plans[0].total / (1 - MARGIN)
        raise ConfigError("memory", f"{budget:.0f}", f"at least {needed:.0f} bytes: parameters, gradients, state and one sample")
    return fitting[-1]


def _explain(config: TrialConfig, budget: int) -> list[str]:
    """What is printed: b and N, the memory they take of the `budget` bytes, measured, and what they save; ConfigError without."""
    effective_batch = config.effective_batch
    plan = choose(effective_batch, budget, *fit_memory(config))
    b, num = plan.micro_batch, plan.accumulation_steps
    whole = max(plan.static + plan.per_sample * effective_batch, plan.step)
    cut = f"{num} micro-batches of {b} samples" if num > 1 else f"the whole window of {b} samples"
    formula = "M_s + a b" if plan.total > plan.step else "M_step (while the optimizer steps)"
    lines = [
        f"b = {b}, N = {num}: {cut}",
        f"static part M_s = {plan.static / 1e6:.4g} MB (parameters, gradients, optimizer state), "
        f"a = {plan.per_sample / 1e6:.4g} MB per sample (kept for backward)",
        f"M = {formula} = {plan.total / 1e6:.4g} MB of {budget / 1e6:.4g} MB, of which {MARGIN:.0%} stay free; "
        f"the full batch would take {whole / 1e6:.4g} MB",
    ]
    if num > 1:
        lines.append(f"accumulating saves {1 - plan.total / whole:.0%}: less than 1 - 1/N, because the static part stays")
    return lines


if __name__ == "__main__":
    sys.exit(run_command(main))
