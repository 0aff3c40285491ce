"""The whole path on a device that is not the CPU, in a process of its own (`device.py` says why)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from accumulation_harness.questions import studies
from tests.simgpu.trials import BASE, OF_STUDIES, READS, TRIALS, WAITS_IN_STEPS

FAULTS = ("loss_not_divided", "cached_weights_stale", "samples_repeated", "resume_in_window")
WAITS_OF_SCALER = 2
LOOKED_AT = ("non_finite_micro_batch", "gradients_not_cleared", "foreign_gradients")
ROOT = Path(__file__).parents[2]
QUICK = ("masks", "no_kernel", "two_devices", "collected", "adaptive_windows", "weighed", "watched_right")
QUICK += ("watched_undivided", "captured", "placed")
SLOW = ("planner", "waits", "adam_scale", "dropout", "copies", "unsteady", "steady", "training", "cached", "every_fault")
CAUSES: tuple[list[str], ...] = ([], ["loss_not_divided"], ["stochastic_layers"], ["stochastic_layers"])  # of these
AUDITS = ("audit_right", "audit_undivided", "audit_dropout", "audit_masks")
RIGHT = ("verdicts", "verdicts_float16", "verdicts_text", "verdicts_policy", "verdicts_ignored", "verdicts_weights")
EXAMPLES = ("example_images", "example_coupled_loss", "example_language_model", "example_my_sweep")
STUDIES = tuple(str(study) for study in OF_STUDIES if study not in (*QUICK, *SLOW))
ELSEWHERE = {"verdicts", "replicas", "resumption"}  # cases of their own; refused; not loadable


@cache
def run(*names: str) -> dict[str, Any]:
    """What each case found, by its name."""
    command = [sys.executable, "-m", "tests.simgpu.cases", *names]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/harness"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows] == list(names), done.stderr
    return {row["case"]: row for row in rows}


def case(name: str, among: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = run(*among)[name]
    assert "error" not in found, "\n".join([found["error"], *found["trace"]])
    assert Counter(found["in_steps"]) <= Counter(WAITS_IN_STEPS.get(name, {}))
    return found


def test_a_tensor_of_the_cpu_is_refused() -> None:
    """CPU tensors of no dimension are numbers, but not to hold a sum of the device's, and not in a list with them."""
    found = case("two_devices", QUICK)
    for name in ("refused", "sum_on_the_host", "listed"):
        assert found[name].startswith("Expected all tensors to be on the same device"), name
    assert found["number"] == 4.0


def test_waits_are_counted() -> None:
    """A read, a mask on the device, an index and a copy from the host; not what is copied without waiting, nor a number put."""
    found = case("two_devices", QUICK)
    assert found["read"] == [["_local_scalar_dense"], ["index"], [], []]
    assert found["waited"] == [["index of [2]"], ["copy of [2]"], ["copy of [3]"], []]
    assert found["in_a_step"] == {"_local_scalar_dense in recipe.take_step": 1}


@pytest.mark.parametrize(
    ("name", "among"), [("adaptive_windows", QUICK), pytest.param("adam_scale", SLOW, marks=pytest.mark.slow)]
)
def test_studies_that_use_the_initial_weights_find_them_on_the_device(name: str, among: Sequence[str]) -> None:
    found = case(name, among)
    assert found["measurements"] and found["device"] == "simgpu" and found["generators_kept"]
    assert found["reads"] <= READS[name]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("phase", ["micro_batches", "step"])
def test_the_planner_measures_what_a_ledger_says(optimizer: str, phase: str) -> None:
    """Adam's state is there while micro-batches are computed, although a fresh arm makes it after its first ones."""
    measured, by_hand = case("planner", SLOW)[optimizer][phase]
    assert measured == pytest.approx(by_hand, rel=0.05)


@pytest.mark.slow
def test_the_plan_grows_with_the_micro_batch() -> None:
    """And is measured on the device, whose memory has held as much."""
    found = case("planner", SLOW)
    static, per_sample, step = found["fit"]
    assert per_sample > 0 and step > 0 and static > 0
    assert found["fit_took"] > static


def test_repeated_masks_are_repeated_on_the_device() -> None:
    found = case("masks", QUICK)
    assert (found["repeated"], found["right"]) == (1, 4)


def test_masks_of_another_format_are_others_on_the_device() -> None:
    """A GPU draws as many numbers at once as fit into 16 bytes: float64 has other masks than float32."""
    found = case("masks", QUICK)
    assert found["shared"] == [False, True] and found["shared_without"]


def test_arms_of_an_earlier_phase_are_collected_before_others_are_made() -> None:
    found = case("collected", QUICK)
    assert (found["before"], found["after"]) == (False, True)


def test_what_an_earlier_phase_left_behind_is_collected_before_a_step_is_weighed() -> None:
    found = case("weighed", QUICK)
    assert (found["before"], found["after"]) == (False, True)


@pytest.mark.slow
def test_the_steps_of_faults_wait_no_more_than_right_ones() -> None:
    """But for the one that looks at each gradient, two that move the scale or use it more often, and what counts leftovers."""
    found = case("every_fault", SLOW)
    assert found["usual"] == {"float32": {}, "float16": {"_local_scalar_dense in recipe.step": 2}}
    assert found["more"].keys() == {
        *(f"{fault} {precision}" for fault in LOOKED_AT for precision in ("float32", "float16")),
        "step_every_micro_batch float16",
        "scaler_updated_in_window float16",
    }


@pytest.mark.parametrize(("name", "verdict", "causes"), [
    ("watched_right", "equivalent", []), ("watched_undivided", "different", ["loss_not_divided"])
])  # fmt: skip
def test_a_loop_on_the_device_is_watched(name: str, verdict: str, causes: list[str]) -> None:
    """The replay leaves no trace in its generator; a window that is not looked at closely is read once, at its end."""
    found = case(name, QUICK)
    assert (found["verdict"], found["causes"]) == (verdict, causes)
    assert found["replayed"] == (verdict == "equivalent") and found["generators_kept"]
    assert found["late_reads"] == [1] * 4


def test_numbers_of_a_state_indices_of_its_groups_and_stored_weights_are_on_the_device() -> None:
    found = case("placed", QUICK)
    assert found["devices"] == ["simgpu:0"] and found["numbers"] == [1.5, 2.0, 3.0]
    assert found["indices"] and found["stored"]


def test_capturing_puts_the_devices_generator_back() -> None:
    found = case("captured", QUICK)
    assert found["draws"] and found["kept"]


@pytest.mark.slow
def test_a_step_of_a_training_reads_the_device_once_and_its_noise_scale_once() -> None:
    assert case("training", SLOW)["a_step"] == 2


@pytest.mark.slow
def test_cached_representations_are_computed_again_with_the_devices_draws() -> None:
    found = case("cached", SLOW)
    assert found["grad_cache"] == {"different": 4, "again": True}
    assert found["grad_cache_other_draws"] == {"different": 4, "again": False}


@pytest.mark.slow
def test_where_float64_draws_other_masks_there_is_no_error_beside_it() -> None:
    found = case("dropout", SLOW)
    assert found["float32"] and all(map(math.isnan, found["float32"]))
    assert found["float64"] and max(found["float64"]) < 1e-9


@pytest.mark.slow
def test_no_copy_from_the_host_is_waited_for_and_a_clock_starts_after_what_is_under_way() -> None:
    """memory_and_time: three windows of the full batch and of four micro-batches."""
    found = case("copies", SLOW)
    for data in ("digits", "ignored_labels", "policy", "pairs", "text", "python_bytes", "docstrings"):
        assert found[data] == {} and found[f"{data} reads"] == 0, data
    assert found["synchronised"] == 3 * 2


@pytest.mark.slow
def test_nothing_is_concluded_where_the_floor_is_above_the_gate() -> None:
    """Products that differ from run to run by 1e-6 of themselves, and by 1e-15, which is a property of every kernel."""
    for _, verdict, reasons in case("unsteady", SLOW)["arms"]:
        assert verdict == "inconclusive" and "a shuffled full batch differs by" in reasons[0]
    assert [verdict for _, verdict, _ in case("steady", SLOW)["arms"]] == ["equivalent", "equivalent"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causes"), list(zip(AUDITS, ([], ["loss_not_divided"], *[["stochastic_layers"]] * 2), strict=True))
)
def test_loops_on_the_device_are_audited(name: str, causes: list[str]) -> None:
    found = case(name, AUDITS)
    assert found["causes"] == causes and found["equivalent"] == (not causes)


@pytest.mark.slow
def test_a_step_reads_the_device_once_and_float16_twice_more_for_each_arm() -> None:
    """Float16: the scaler asks whether a gradient overflowed, and the scale that it then has is read."""
    found = case("waits", SLOW)
    assert found["float32"] == 1
    assert found["float16"] == 1 + WAITS_OF_SCALER * found["arms"]


def test_an_operation_without_a_deterministic_kernel_is_named_once() -> None:
    found = case("no_kernel", QUICK)
    assert found["named"] == ["kthvalue_simgpu_kernel"] and found["results"] == [1.0, 1.0]
    assert len(found["told"]) == 1 and "kthvalue_simgpu_kernel" in found["told"][0]
    assert "does not have a deterministic implementation" in found["raised"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_trials_are_equivalent(name: str) -> None:
    found = case(name, RIGHT)
    assert [verdict for _, verdict, *_ in found["arms"]] == ["equivalent", "equivalent"]
    assert found["device"] == "simgpu" and found["generators_kept"]


def test_every_study_has_a_case() -> None:
    assert OF_STUDIES.keys() | ELSEWHERE == studies().keys() and READS.keys() == OF_STUDIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs(name: str) -> None:
    found = case(name, STUDIES)
    assert found["measurements"] and found["generators_kept"]
    assert found["reads"] <= READS[name]
    assert found["moved"] <= TRIALS[name].get("steps", BASE["steps"])  # tensors as a whole: the numbers of terms of each window


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("verdicts_batch_norm", {"accumulated": "batch_statistics"}),
        ("verdicts_pairs", {"accumulated": "non_separable_loss"}),
        ("verdicts_faults", {fault: fault for fault in FAULTS} | {"accumulated": ""}),
    ],
)
def test_what_differs_is_named(name: str, causes: dict[str, str]) -> None:
    """Faults that call the model with other weights, index the data again and restore generators are among them."""
    found = {arm: cause for arm, _, cause, _ in case(name, [name])["arms"] if arm in causes}
    assert found == causes


@pytest.mark.slow
def test_loops_by_hand_and_tasks_of_ones_own() -> None:
    names = ("by_hand", "by_hand_undivided", *EXAMPLES)
    assert case(names[0], names)["verdict"] == "equivalent"
    assert case(names[1], names)["cause"] == "loss_not_divided"
    causes = [[cause for _, _, cause, _ in case(name, names)["arms"]] for name in names[2:]]
    assert causes == [["", ""], ["non_separable_loss", ""], ["", ""], ["", ""]]
