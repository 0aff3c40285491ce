"""`python -m harness.bench [PART...] [--out FILE]`: what the harness costs, as a table and as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.bench.measure import Measure, table, to_dict

PARTS = {
    "overhead": "a trial against the same arms as bare loops",
    "by_hand": "a sweep against a hand-written one (benchmarks/sweep_by_hand.py)",
    "scaling": "time over trials, N, parameters, tensors, workers",
    "stored": "store and report over 10, 1,000 and 10,000 trials",
    "startup": "--help, and one tiny trial from the shell",
    "memory": "peak of a trial against bare arms, and copies kept for comparing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench",
        description=__doc__,
        epilog="\n".join(f"{name:10} {what}" for name, what in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--large", action="store_true", help="by_hand: 48 cells x 100 steps (half an hour)")
    parser.add_argument("--out", type=Path, default=Path("reports/bench.json"), help="JSON file (default: reports/bench.json)")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    measures: list[Measure] = []
    for part in options.parts or PARTS:
        started = time.perf_counter()
        sizes = {"large": True} if options.large and part == "by_hand" else {}
        for measure in importlib.import_module(f"harness.bench.{part}").measure(**sizes):
            measures.append(measure)
            print(f"  {measure.part}: {measure.name}: {measure.wall.median:.4g} {measure.unit}", file=sys.stderr, flush=True)
        print(f"{part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(measures))
    _write(options.out, measures)
    return 0


def _write(path: Path, measures: Sequence[Measure]) -> None:
    """The measures of this run; parts of an earlier run that this one did not take stay as they are."""
    import torch

    from harness.config import Device
    from harness.determinism import choose_device
    from harness.environment import describe
    from harness.record import write_whole

    taken = {measure.part for measure in measures}
    try:
        earlier = [row for row in json.loads(path.read_text())["measures"] if row["part"] not in taken]
    except (OSError, ValueError, KeyError):
        earlier = []
    environment = describe(choose_device(Device.auto)) | {"cores": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment, "measures": earlier + [to_dict(measure) for measure in measures]}
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    print(path)


if __name__ == "__main__":
    sys.exit(main())
