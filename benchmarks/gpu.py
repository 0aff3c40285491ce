"""`make gpu` on a machine with a CUDA card: `python benchmarks/gpu.py [--minutes 25] [--out DIR]`; DIR.tar.gz is what to send.

Each part runs whatever became of the one before, ends when its share of the time is over, and is packed with all before it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HARNESS = ("-m", "accumulation_harness")


def parts(out: Path, device: str) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Name -> share of the time, and arguments of Python."""
    stored = f"results={out}-trials"
    return {
        "doctor": (0.05, (*HARNESS, "doctor")),
        "tests": (0.3, ("-m", "pytest", "-v", "-m", "gpu", "tests", f"--junitxml={out / 'tests.xml'}")),
        "grid": (0.35, (*HARNESS, "run", "+experiment=gpu", f"device={device}", stored)),
        "report": (0.05, (*HARNESS, "report", "--results", f"{out}-trials", "--out", f"{out / 'report'}")),
        "benchmarks": (0.25, ("benchmarks/run.py", "watched", "sweep", "startup", "--rounds", "3")),
    }


def main() -> int:
    """1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, (share, arguments) in parts(out, options.device).items():
        limit = ("timeout", "--kill-after=10", f"{60 * options.minutes * share:.0f}")  # its whole group ends
        with (out / f"{name}.log").open("w") as log:
            code = subprocess.run([*limit, sys.executable, *arguments], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        failed += [name] * (code != 0)
        print(f"{name}: {'ok' if code == 0 else f'failed with exit code {code}'}, {out / name}.log", flush=True)
        with tarfile.open(unfinished := out.with_suffix(".part"), "w:gz") as archive:
            archive.add(out, arcname=out.name)
        unfinished.replace(out.with_suffix(".tar.gz"))
    print(f"everything is in {out}.tar.gz: please send it, whatever failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
