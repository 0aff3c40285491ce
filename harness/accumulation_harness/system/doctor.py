"""`accumulation-harness doctor`: what a report of a bug needs, and why a GPU is not seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch.utils import collect_env

from accumulation_harness.system import accelerator, driver, terminal
from accumulation_harness.system.packages import version
from accumulation_harness.system.processes import run_command
from accumulation_harness.system.source import commit

# Beside what torch names itself.
PACKAGES = ("accumulation-harness", "hydra-core", "wandb", "pandas", "scipy", "accelerate", "lightning", "transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0.
    """
    terminal.parser("doctor", __doc__).parse_args(arguments)
    print(collect_env.get_pretty_env_info(), *machine_lines(), sep="\n")
    return 0


def machine_lines() -> Iterator[str]:
    """What torch's own report does not say.

    Yields:
        Lines for a terminal.
    """
    yield f"commit {commit()['commit']}; " + ", ".join(f"{name} {found}" for name in PACKAGES if (found := version(name)))
    reason, shown = accelerator.why_unavailable(), driver.answer()
    if shown.problem:
        yield f"The driver cannot be asked: {shown.problem}."
    if reason is None:
        yield f"{torch.cuda.device_count()} GPU(s) can be used: a sweep runs workers= trials on each, one unless it is set."
        return
    yield f"No GPU can be used: {reason}."
    if "too old" in reason:
        yield "Install a newer driver, or a torch for an older CUDA: make TORCH_INDEX=https://download.pytorch.org/whl/cu126"


if __name__ == "__main__":
    sys.exit(run_command(main))
