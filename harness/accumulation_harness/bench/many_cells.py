"""`accumulation-harness bench.many_cells NUMBER`: a sweep of so many trials that do nothing, and what its parent takes.

What is left of a sweep without its trials: cells, identities, a process for each, the progress line. Every such process imports
this module, which therefore imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accumulation_harness.bench.measurement import Measurement

PART = "many_cells"
NUMBER = 2_000
PAGE = os.sysconf("SC_PAGE_SIZE")
EVERY = 0.2  # seconds between two looks
GROWTH = 1.05  # of the resident memory, after a tenth of the time


def measurements(number: int = NUMBER) -> Iterator[Measurement]:
    """Growth of the parent's resident memory, and milliseconds a cell."""
    import subprocess

    from accumulation_harness.bench.cost import Spread
    from accumulation_harness.bench.measurement import Measurement

    command = [sys.executable, "-m", "accumulation_harness.bench.many_cells", f"{number}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    sizes, seconds = json.loads(done.stdout.splitlines()[-1])
    early, late = sizes[len(sizes) // 10], max(sizes[len(sizes) // 10 :])
    note = f"{early / 1e6:.0f} MB after a tenth of the time, {late / 1e6:.0f} MB at most later on; one run"
    told = f"over {number:,} trials that do nothing"
    yield Measurement(
        part=PART, name=f"resident memory of a sweep {told}", unit="x", wall=Spread.of([late / early]), target=GROWTH, note=note
    )
    yield Measurement(part=PART, name=f"a cell {told}", unit="ms", wall=Spread.of([seconds / number * 1e3]), note="one run")


def nothing(_config: object) -> None:
    """A trial that ends at once."""


def looked(until: threading.Event) -> Iterator[int]:
    """Bytes of this process that are in memory, now and then."""
    while not until.wait(EVERY):
        yield int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main(arguments: Sequence[str]) -> int:
    """Run the cells; print the sizes that were seen and the seconds that it took."""
    from accumulation_harness.config import Data, HarnessConfig, Model, TrackingConfig, TrackingMode, WorkloadConfig
    from accumulation_harness.sweep.experiment import run_many

    workload, tracking = WorkloadConfig(data=Data.digits, model=Model.mlp), TrackingConfig(mode=TrackingMode.disabled)

    sizes: list[int] = []
    ended = threading.Event()
    watcher = threading.Thread(target=lambda: sizes.extend(looked(ended)))
    with tempfile.TemporaryDirectory() as folder:
        watcher.start()
        started = time.perf_counter()
        cells = range(int(arguments[0]))
        run_many([HarnessConfig(workload=workload, tracking=tracking, results=folder, seed=seed) for seed in cells], nothing)
        seconds = time.perf_counter() - started
        ended.set()
        watcher.join()
    print(json.dumps([sizes, seconds]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
