"""Trackers and hubs are left alone: what an audit runs is no experiment, and is sent nowhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from accumulation_harness.audit.user_code.imports import replaced
from accumulation_harness.observe.patches import Wrap

LOCAL = f"file:{tempfile.gettempdir()}/mlruns"  # of all runs, since MLflow keeps it open
OFF = {  # variables of the environment that switch trackers off
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": LOCAL,
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # which is sent, and written into the home folder
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
CALLS: dict[str, dict[str, Mapping[str, Any] | None]] = {  # module -> function -> keyword arguments, whatever the code gives
    "wandb": {"init": {"mode": "disabled"}, "login": None},  # None: left out, since it would ask for a key
    "mlflow": {"set_tracking_uri": {"uri": LOCAL}},
    "comet_ml": {"Experiment.__init__": {"disabled": True}, "start": {"online": False}, "login": None},
    "neptune": {"init_run": {"mode": "debug"}},
    "swanlab": {"init": {"mode": "disabled"}, "login": None},
}
ENDS = {"mlflow": "end_run"}  # what the end of a process would call
UPLOADS = {"huggingface_hub.hf_api": ("HfApi.create_repo", "HfApi.create_commit")}  # all others end in these


@contextmanager
def trackers_off(tell: Callable[[str], None]) -> Iterator[None]:
    """Switch trackers off inside, whatever mode the code itself asks for.

    Args:
        tell: Gets the name of each call that is kept from a tracker.
    """
    changes: dict[str, dict[str, Wrap]] = {
        module: {
            name: _left_out if keywords is None else partial(_changed, f"{module}.{name}", tell, keywords)
            for name, keywords in functions.items()
        }
        for module, functions in CALLS.items()
    }
    for module, methods in UPLOADS.items():
        changes[module] = {name: _refused for name in methods}
    with replaced(changes):
        try:
            yield
        finally:
            for module in ENDS.keys() & sys.modules.keys():
                with suppress(Exception):
                    getattr(sys.modules[module], ENDS[module])()


def _changed(
    said: str, tell: Callable[[str], None], keywords: Mapping[str, Any], original: Wrap, *args: Any, **kwargs: Any
) -> Any:
    tell(said.removesuffix(".__init__"))
    return original(*(args if "uri" not in keywords else ()), **{**kwargs, **keywords})


def _left_out(original: Wrap, *args: Any, **kwargs: Any) -> bool:
    return True


def _refused(original: Wrap, *args: Any, **kwargs: Any) -> NoReturn:
    raise PermissionError(f"{original.__name__} was called: an audit uploads nothing; switch it off, as by push_to_hub=False")
