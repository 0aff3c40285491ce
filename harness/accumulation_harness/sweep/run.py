"""`accumulation-harness run`: one trial, a sweep, or a named grid."""

from __future__ import annotations

import os
import sys
import warnings

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from accumulation_harness.config import usage
from accumulation_harness.config.compose import conf_dir, explain, is_bad_input, register_schema, to_config
from accumulation_harness.sweep import experiment
from accumulation_harness.system import packages
from accumulation_harness.system.files import keep_others_out
from accumulation_harness.system.terminal import BAD_INPUT, one_line


def main() -> int:
    """Run the command line of this process and return its exit code: 0 done, 1 failed, 2 bad input, 128 + n for signal n.

    Returns:
        The exit code.
    """
    if (answer := packages.versions() if "--version" in sys.argv else usage.asked(sys.argv[1:], conf_dir())) is not None:
        print(answer)
        return 0
    before = os.environ.get("HYDRA_FULL_ERROR")
    # Hydra then hands exceptions on, instead of printing them in its own way and leaving with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[0] = "accumulation-harness run"  # the name in usage messages
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))  # Hydra wants it first
    warnings.filterwarnings("ignore", message="Experimental rerun")
    register_schema()
    keep_others_out()
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(_run_composed)()
    except _Stop as stop:
        error: BaseException = stop.error
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
    else:
        return 0
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ |= {} if before is None else {"HYDRA_FULL_ERROR": before}
    return report(error)


def report(error: BaseException) -> int:
    """Print what stopped the command; HYDRA_FULL_ERROR=1 shows the traceback of bad input.

    Args:
        error: What stopped it. An error of the program is raised again.

    Returns:
        The exit code: `BAD_INPUT`, 1 where trials failed, 128 + the number of a signal.
    """
    match error:
        case experiment.TrialsFailed():
            return BAD_INPUT if error.outcome.is_bad_input else 1  # `run_many` has reported every failure
        case experiment.Interrupted():
            print(error, file=sys.stderr)
            return 128 + error.signal
        case KeyboardInterrupt():
            print("Stopped before the first trial.", file=sys.stderr)
            return 130
        case _ if is_bad_input(error) and os.environ.get("HYDRA_FULL_ERROR") != "1":
            print(one_line(explain(error)), file=sys.stderr)
            return BAD_INPUT
        case _:
            raise error


class _Stop(BaseException):
    """Carries an error past Hydra's `run_job`, which would print a line of its own about it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run_composed(composed: DictConfig) -> None:
    """Hydra's task function: one trial, in its own child process."""
    try:
        experiment.run_many([to_config(composed)]).raise_failures()
    except Exception as error:
        if HydraConfig.get().mode == RunMode.RUN:
            raise _Stop(error) from error
        raise  # under hydra/launcher=basic the other trials go on
