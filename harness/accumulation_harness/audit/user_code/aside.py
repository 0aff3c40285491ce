"""Run a script of an issue in a scratch image of this folder, with trackers off: `... aside SCRIPT`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from accumulation_harness.audit.user_code.scratch import Scratch
from accumulation_harness.audit.user_code.trackers import OFF, trackers_off


def main(script: str) -> None:
    """Run a script as `python SCRIPT` does, in a scratch copy of the working folder.

    Args:
        script: Path of the script.
    """
    folder = Path.cwd()
    scratch = Scratch([folder])
    scratch.renew()
    with scratch.watched(), trackers_off(lambda said: None):
        os.environ |= OFF
        os.chdir(scratch.here(folder))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
