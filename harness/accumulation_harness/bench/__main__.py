"""`accumulation-harness bench [PART...] [SETTING=VALUE...] [--out FILE]`: what the harness costs, as a table and as JSON.

Without arguments all parts are measured that the file does not have yet from this very commit: a bench that was stopped goes on.
With settings, `overhead` and `profile` measure that trial (as `workload=text norm=layer precision=bfloat16`), and `by_hand` that
grid (as `norm=none,group steps=50`), in the place of those that have targets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accumulation_harness.bench.cost import CommandFailed
from accumulation_harness.bench.measurement import Measurement, from_dict, table, to_dict
from accumulation_harness.compose import BadInput, compose_trial
from accumulation_harness.config import ConfigError
from accumulation_harness.processes import run_command
from accumulation_harness.terminal import one_line

PARTS = {
    "overhead": "a trial against the same arms as bare loops",
    "by_hand": "a sweep against a hand-written one (bench/sweep_by_hand.py)",
    "scaling": "time over trials, N, parameters, tensors, workers",
    "many_cells": "memory of a sweep's parent over 2,000 trials that do nothing",
    "stored": "store and report over 10, 1,000 and 10,000 trials",
    "startup": "--help, and one tiny trial from the shell",
    "memory": "peak of a trial against bare arms, and copies kept for comparing",
    "audit": "time and peak memory of an audit over one plain run, by parameters",
    "watch": "a watched training step over an unwatched one, by parameters",
    "profile": "where the processor time of a trial goes",
}
MODULES = {"by_hand": "script_sweep"}  # where a part has not the name of its module
OF_TRIALS, OF_SWEEPS = ("overhead", "profile"), ("by_hand",)  # those that can measure others than their own


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts asked for, print the table, write the JSON; 2 for an argument that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="accumulation-harness bench",
        description=__doc__,
        epilog="\n".join(f"{name:10} {what}" for name, what in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART|SETTING=VALUE",
        help=f"of {', '.join(PARTS)} (default: all; with settings: {OF_TRIALS[0]} and {OF_TRIALS[1]})",
    )
    parser.add_argument("--out", type=_file, default=Path("reports/bench.json"), help="JSON file (default: reports/bench.json)")
    options = parser.parse_args(arguments)
    settings = [text for text in options.parts if "=" in text]
    parts = [text for text in options.parts if text not in settings] or (list(OF_TRIALS) if settings else list(PARTS))
    known = [*OF_TRIALS, *OF_SWEEPS] if settings else list(PARTS)
    if unknown := [part for part in parts if part not in known]:
        parser.error(f"expected parts of {', '.join(known)}{' with settings' if settings else ''}, got {', '.join(unknown)}")
    measurements = [] if options.parts else _standing(options.out)
    try:
        for part in (part for part in parts if part not in {one.part for one in measurements}):
            started = time.perf_counter()
            module = importlib.import_module(f"accumulation_harness.bench.{MODULES.get(part, part)}")
            for one in module.measurements(**_of(part, settings)):
                measurements.append(one)
                print(f"  {one.part}: {one.name}: {one.wall.median:.4g} {one.unit}", file=sys.stderr, flush=True)
            print(f"{part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            _write(options.out, measurements)
    except (BadInput, ConfigError, CommandFailed) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    print(table(measurements))
    print(options.out)
    return 0


def _standing(path: Path) -> list[Measurement]:
    """What an earlier bench has measured of the code as it is: at the same commit, with nothing changed since."""
    from accumulation_harness.source import commit

    try:
        content = json.loads(path.read_text())
        made = content["environment"]["commit"], content["environment"]["clean"]
        standing = [from_dict(row) for row in content["measures"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return standing if made == (commit()["commit"], True) and commit()["clean"] else []


def _file(text: str) -> Path:
    """Where the JSON can be written, which is not found out after an hour of measuring; nothing else is ever overwritten."""
    path = Path(text)
    try:
        is_ours = path.is_file() and "measures" in json.loads(path.read_bytes())
    except (OSError, ValueError, TypeError):
        is_ours = False
    taken = path.exists() or path.is_symlink() or any(parent.exists() and not parent.is_dir() for parent in path.parents)
    if taken and not is_ours:
        raise argparse.ArgumentTypeError(f"expected an earlier bench's JSON file or a new one, got {text or 'nothing'}")
    return path


def _of(part: str, settings: Sequence[str]) -> dict[str, Any]:
    """Arguments of a part: what it measures, where that is not its own choice."""
    if not settings:
        return {}
    return {"overrides": settings} if part in OF_SWEEPS else {"configs": [compose_trial(settings)]}


def _write(path: Path, measurements: Sequence[Measurement]) -> None:
    """Write the measurements of this run; parts of an earlier run that this one did not take stay as they are."""
    import torch

    from accumulation_harness.config import Device
    from accumulation_harness.measure.environment import describe
    from accumulation_harness.recipes.determinism import choose_device
    from accumulation_harness.results.record import write_atomically

    taken = {one.part for one in measurements}
    try:
        earlier = [row for row in json.loads(path.read_text())["measures"] if row["part"] not in taken]
    except (OSError, ValueError, KeyError):
        earlier = []
    environment = describe(choose_device(Device.auto)) | {"cores": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "measures": earlier + [to_dict(one) for one in measurements]}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(run_command(main))
