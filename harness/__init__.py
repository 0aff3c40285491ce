import _signal  # type: ignore[import-not-found] # of `signal` what is there at once: the rest takes 5 ms
import os
import sys


def _is_command() -> bool:
    """Whether this is imported because one of our commands was called, as `python -m harness.audit` or by its own name."""
    if sys.argv[:1] == ["-m"]:  # Python is looking for the module
        asked = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:-1] else ""
        return asked.partition(".")[0] in ("harness", "analysis")
    return os.path.basename(sys.argv[0]) == "accumulation-harness"


if _is_command():  # its imports take a while: until it has signal handlers, Ctrl-C ends it as SIGTERM does, without a traceback
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
