"""`accumulation-harness COMMAND ...`, or `python -m accumulation_harness COMMAND ...`: one command for all, in any folder."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

from accumulation_harness.system.packages import versions
from accumulation_harness.system.terminal import suggesting

COMMANDS = {
    "run": ("accumulation_harness.sweep", "one trial, a sweep (-m), or a named grid (+experiment=NAME)"),
    "report": ("accumulation_harness.analysis.report", "the page, the verdicts and the figures of stored results"),
    "audit": ("accumulation_harness.audit", "whether accumulation changes what a script or a function trains"),
    "watch": ("accumulation_harness.watch", "`watch show`, `watch compare`: reports of watched training runs"),
    "converge": ("accumulation_harness.converge", "whether it trains as the large batch does, over seeds: loss or any metric"),
    "advise": ("accumulation_harness.advise", "which micro-batch, how many, which learning rate, and what it costs"),
    "plan": ("accumulation_harness.measure.plan", "the micro-batch that fits a memory; `plan trial`: memory and time of a trial"),
    "status": ("accumulation_harness.sweep.status", "where the trials of a store stand"),
    "verify": ("accumulation_harness.sweep.verify", "whether a store is damaged"),
    "sync": ("accumulation_harness.analysis.sync", "upload the offline W&B runs of a store, and one run per sweep"),
    "doctor": ("accumulation_harness.system.doctor", "what a report of a bug needs, and why a GPU is not seen"),
    "affected": ("accumulation_harness.affected", "which pinned releases compute something else with accumulation"),
    "remedy": ("accumulation_harness.judge.remedy", "what to change for a cause, with a patch"),
    "lint": ("accumulation_harness.lint", "static checks of source files for accumulation bugs"),
}
LIGHT = ("affected", "audit", "watch", "doctor", "lint", "remedy")  # torch and numpy are enough
OF_SWEEPS = ("hydra", "jinja2", "matplotlib", "omegaconf", "pandas", "pyarrow", "rich", "scipy", "sklearn", "wandb")


def main() -> None:
    """Run a command as `python -m` runs its module, with the arguments after its name; exit code 2 where there is none such."""
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked == "--version":
        print(versions())
    elif asked in ("-h", "--help"):
        print("usage: accumulation-harness COMMAND ...")
        print("\n".join(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()))
    elif asked not in COMMANDS:
        sys.exit(refused(suggesting(f"{asked}: expected one of {', '.join(COMMANDS)}")))
    elif missing := [name for name in OF_SWEEPS if asked not in LIGHT and find_spec(name) is None]:
        needed = ", ".join(missing)
        sys.exit(refused(f"accumulation-harness {asked} needs {needed}: pip install 'accumulation-harness[sweep]'"))
    else:
        del sys.argv[1]
        runpy.run_module(COMMANDS[asked][0], run_name="__main__", alter_sys=True)


def refused(line: str) -> int:
    """Print why an input is refused, and give the exit code of bad input.

    Args:
        line: What is wrong, as it is printed.

    Returns:
        2.
    """
    print(line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
