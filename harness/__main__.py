"""`python -m harness`: see `run.py`."""

import sys

from harness.run import main

if __name__ == "__main__":
    sys.exit(main())
