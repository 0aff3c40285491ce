"""`python -m harness`: see `run.py`."""

import sys

from harness.sweep.child import forkserver_at_work


def main() -> int:
    """As `run.main`. What trials import is imported by their forkserver while Hydra composes, on another core."""
    asks = any(argument.startswith("-") and argument not in ("-m", "--multirun") for argument in sys.argv[1:])
    with forkserver_at_work(start=not asks):
        from harness import run

        return run.main()


if __name__ == "__main__":
    sys.exit(main())
