"""`accumulation-harness COMMAND ...`: one command for all, which works in any folder, whatever the folder holds."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

from accumulation_harness import usage

COMMANDS = {
    "run": ("accumulation_harness.start", "one trial, a sweep (-m), or a named grid (+experiment=NAME)"),
    "report": ("accumulation_harness.analysis.report", "the page, the verdicts and the figures of stored results"),
    "audit": ("accumulation_harness.audit", "whether accumulation changes what FILE.py:FUNCTION trains"),
    "watch": ("accumulation_harness.watch", "two reports of watched training runs, compared"),
    "plan": ("accumulation_harness.plan", "the micro-batch that fits a memory"),
    "sync": ("accumulation_harness.analysis.sync", "upload the offline W&B runs of a store, and one run per sweep"),
    "status": ("accumulation_harness.status", "where the trials of a store stand"),
    "doctor": ("accumulation_harness.doctor", "what a report of a bug needs, and why a GPU is not seen"),
}
LIGHT = ("audit", "watch", "doctor")  # torch and numpy are enough
OF_SWEEPS = (  # packages of the extra `sweep`
    "hydra",
    "jinja2",
    "matplotlib",
    "omegaconf",
    "pandas",
    "pyarrow",
    "rich",
    "scipy",
    "sklearn",
    "wandb",
)


def main() -> None:
    """Run a command as `python -m` runs its module, with the arguments after its name; exit code 2 where there is none such."""
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked == "--version":
        print(usage.versions())
        return
    if asked not in COMMANDS:
        is_help = asked in ("-h", "--help")
        lines = ["usage: accumulation-harness COMMAND ...", *(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items())]
        if not is_help:
            lines.insert(0, f"accumulation-harness {asked}: expected one of {', '.join(COMMANDS)}")
        print("\n".join(lines), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    module, _ = COMMANDS[asked]
    missing = [name for name in OF_SWEEPS if asked not in LIGHT and find_spec(name) is None]
    if missing:
        print(
            f"accumulation-harness {asked} needs {', '.join(missing)}: pip install 'accumulation-harness[sweep]'", file=sys.stderr
        )
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
