import _signal  # type: ignore[import-not-found] # of `signal` what is there at once: the rest takes 5 ms
import os
import sys

LEAST_ADDRESSES = 13 * 2**26  # bytes, 832 MiB: with less, libraries end a process in the middle, each in its own way


def _is_command() -> bool:
    """Whether this is imported because one of our commands was called, as `accumulation-harness audit` or by its own name."""
    if sys.argv[:1] == ["-m"]:  # Python is looking for the module
        asked = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:-1] else ""
        return asked.partition(".")[0] == "accumulation_harness"
    return os.path.basename(sys.argv[0]) == "accumulation-harness"


if _is_command():  # its imports take a while: until it has signal handlers, Ctrl-C ends it as SIGTERM does, without a traceback
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever a notebook or a shell has chosen
    import resource

    if 0 <= (_space := resource.getrlimit(resource.RLIMIT_AS)[0]) < LEAST_ADDRESSES:
        print(f"ulimit -v {_space // 1024}: expected at least {LEAST_ADDRESSES // 1024}, which libraries take", file=sys.stderr)
        sys.exit(2)
