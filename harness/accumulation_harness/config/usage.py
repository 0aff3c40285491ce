"""What `accumulation-harness run --help` prints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from accumulation_harness.config import settings
from accumulation_harness.config.questions import grids
from accumulation_harness.system.terminal import in_columns

HEADER = """\
usage: accumulation-harness run [-m] [+experiment=NAME] [key=value ...]

Is gradient accumulation the same computation as one large batch? Each trial trains the same model with one batch of B samples
per optimizer step, and with N micro-batches of b = B / N samples, and compares both with a double-precision reference.

  accumulation-harness run [key=value ...]              one trial
  accumulation-harness run -m [key=a,b,c ...]           a sweep over all combinations
  accumulation-harness run +experiment=NAME [key=...]   a named grid; key=value restricts or replaces its axes
  accumulation-harness run -m name=mine ...             a sweep under a name of your own
  accumulation-harness run --config-dir DIR ...         with your own workload/, optimizer/ and experiment/ YAML

A finished trial is skipped, so the same command resumes what was stopped."""
FOOTER = """\
Exit codes: 0 done, 1 a trial failed, 2 bad input, 130 or 143 stopped by a signal.
Parallel trials on this machine are the default; hydra/launcher=submitit_slurm sends them to a cluster (extra `slurm`).
HYDRA_FULL_ERROR=1 shows tracebacks; --hydra-help explains the flags of Hydra itself."""
GROUPS = ("workload", "optimizer", "schedule", "tracking")


def asked(arguments: Sequence[str], conf_dir: Path) -> str | None:
    """Answer a request for help.

    Args:
        arguments: The command line without the command.
        conf_dir: The folder of the package's YAML files.

    Returns:
        The help; None where neither `-h` nor `--help` is among the arguments.
    """
    if not {"-h", "--help"} & set(arguments):
        return None
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    own = parser.parse_known_args(list(arguments))[0].config_dir
    return "\n".join(_help([conf_dir, *([own] if own else [])]))


def _help(folders: Sequence[Path]) -> Iterator[str]:
    yield f"{HEADER}\n\nPresets (group=NAME):"
    yield from in_columns([(f"  {group}=", ", ".join(_names(folders, group))) for group in GROUPS])
    yield "\nNamed grids (+experiment=NAME):"
    yield from in_columns([(f"  {name}", _question(path)) for name, path in (grids() | _names(folders, "experiment")).items()])
    yield f"\nSettings (name=default, meaning; values):\n{settings.text()}\n\n{FOOTER}"


def _names(folders: Sequence[Path], group: str) -> dict[str, Path]:
    """The YAML files of a group by name, those of a folder of one's own last."""
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def _question(path: Path) -> str:
    """The first comment of the file that is a sentence."""
    lines = (line.removeprefix("#").strip() for line in path.read_text(errors="replace").splitlines() if line.startswith("#"))
    return next((line for line in lines if not line.startswith("@package")), "")
