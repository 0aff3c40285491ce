"""Functions of an observer that raise: which a run goes through, and one of them planted to fail."""

import dis
import re
import sys
from contextlib import contextmanager
from pathlib import Path

RETURNS = {"RETURN_VALUE", "RETURN_CONST"}
IS_PART = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr|module)>$")  # of the function around it
# A key is the file, qualified name, first line of a function


class Planted(RuntimeError):
    """What fails."""


def key(code):
    return Path(code.co_filename).name, code.co_qualname, code.co_firstlineno


@contextmanager
def tracing(trace):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def noting(chosen, found):
    """The functions that are called."""

    def note(frame, event, _):
        if chosen(frame.f_code):
            found.add(key(frame.f_code))

    return tracing(note)


def failing(target, event, fired, chosen):
    """That function raises as it is called, or as it returns, once."""

    def trace(frame, what, _):
        if key(frame.f_code) != target or not chosen(frame.f_code):
            return None
        # a generator that is left, or goes on from here, does not return
        if what == event and (what == "call" or dis.opname[frame.f_code.co_code[frame.f_lasti]] in RETURNS):
            fired.append(target)
            raise Planted(f"in {target[1]}")
        frame.f_trace_lines = False
        return trace

    trace.__code__ = trace.__code__.replace(co_filename="<planted>")  # or this file would be what has failed
    return tracing(trace)
