"""What every trial imports, for the forkserver to import once.

Wandb and pyarrow alone would cost each trial half a second, what `wandb.init` imports another one, and torch._dynamo, which the
first optimizer imports, two. They make half a million objects, nearly all of which stay, and the garbage collector does not look
at them: not while they are made, which took a quarter of the time, and not in a child, where its marks would copy all of their
memory in 0.1 s or more.
"""

import gc
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import TracebackType

from accumulation_harness.system.processes import PR_SET_PDEATHSIG, prctl

MODULES = (
    "torch",
    "torch._dynamo",
    "wandb",
    "wandb.apis.public",
    "wandb.sdk.launch.inputs.internal",
    "requests",
    "pyarrow.parquet",
    "accumulation_harness.measure.studies",
    "accumulation_harness.results.tracking",
)


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what nobody has caught; not that a parent was killed while it said what its child should run.

    Args:
        kind: Type of the exception.
        error: The exception.
        trace: Where it was raised.
    """
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = tell
prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where it is stopped when its command is killed
gc.disable()
for name in MODULES:
    with suppress(ImportError):  # a trial that needs it says so
        import_module(name)
with suppress(ImportError):  # of the code that has just been imported; children find it answered
    import_module("accumulation_harness.system.source").commit()
    import_module("accumulation_harness.results.measurements").code()
gc.freeze()
gc.enable()
