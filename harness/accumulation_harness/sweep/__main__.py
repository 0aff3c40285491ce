"""`accumulation-harness run`: see `run.py`."""

import sys

from accumulation_harness.system.processes import run_command


def main() -> int:
    """Run `run.main`, and clean up what it leaves behind.

    Returns:
        The exit code of `run.main`.
    """
    return run_command(_main)


def _main() -> int:
    """What trials import is imported by their forkserver while Hydra composes, on another core."""
    from accumulation_harness.sweep.child import forkserver_at_work

    asks = any(argument.startswith("-") and argument not in ("-m", "--multirun") for argument in sys.argv[1:])
    with forkserver_at_work(start=not asks):
        from accumulation_harness.sweep import run

        return run.main()


if __name__ == "__main__":
    sys.exit(main())
