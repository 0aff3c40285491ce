"""`accumulation-harness doctor [operations | gpu --out DIR] [--json FILE]`: what this machine can do, and how long it takes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accumulation_harness.config import Device
from accumulation_harness.doctor import machine, operations, stages
from accumulation_harness.processes import run_command
from accumulation_harness.recipes.determinism import choose_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found, and write it as JSON where asked; exit code 1 where something failed, 2 for `gpu` without one."""
    parser = argparse.ArgumentParser(prog="accumulation_harness.doctor", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("machine", "operations", "gpu"), default="machine")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of `gpu`")
    asked = parser.parse_args(arguments)
    if asked.what == "operations":
        return _operations(asked.json)
    if asked.what == "gpu":
        return _gpu(asked.out)
    facts = machine.describe()
    print("\n".join(told(facts)))
    if asked.json:
        _write(asked.json, facts)
    return 0


def _gpu(out: Path) -> int:
    """The doctor first, as a stage as well: what stops it is in the archive, and nothing is known then of the machine."""
    work = stages.Work(out)
    work.run(stages.doctor(out))
    print((out / "doctor.log").read_text(errors="replace"), end="")
    facts = stages.found_by_doctor(out)
    if facts.get("why_no_gpu") is not None:
        print(f"device=cuda: expected a CUDA device: {facts['why_no_gpu']}", file=sys.stderr)
        return 2
    for stage in stages.on_a_gpu(out, facts):
        work.run(stage)
    print(f"everything is in {work.archive}: please send it, whatever failed")
    return work.code


def told(facts: dict[str, Any]) -> list[str]:
    """The facts as lines of text: versions, devices, rates, advice, estimates."""
    rates = [f"{name} {'not computed' if rate is None else f'{rate:.3g}'}" for name, rate in facts["tflops"].items()]
    built = f"torch was built for CUDA {facts['torch_cuda'] or 'none'}"
    return [
        f"python {facts['python']} on {facts['system']}, {facts['cores']} cores",
        ", ".join(f"{name} {found}" for name, found in facts["packages"].items()),
        f"{built}; driver {facts['driver'] or 'none'}; cuDNN {facts['cudnn'] or 'none'}",
        *(f"GPU {k}: {_told(card)}" for k, card in enumerate(facts["devices"])),
        *(f"nvidia-smi shows: {card}" for card in facts["cards_of_driver"]),
        f"matrix products, TFLOP/s: {', '.join(rates)}",
        *machine.advice(facts),
        *(f"{name}: {guess}" for name, guess in machine.estimates(facts).items()),
    ]


def _told(card: dict[str, Any]) -> str:
    if "problem" in card:
        return f"it does not answer ({card['problem']})"
    free, total = card["free_bytes"] / 1e9, card["total_bytes"] / 1e9
    return f"{card['name']}, capability {card['capability']}, {free:.1f} of {total:.1f} GB free"


def _operations(file: Path | None) -> int:
    rows = []
    for row in operations.measure(choose_device(Device.auto)):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if file:
            _write(file, rows)
    return 0 if all(row.get("same_bits_twice") for row in rows) else 1


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
