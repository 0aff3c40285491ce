"""The doctor on this machine, and on odd ones that are faked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accumulation_harness import accelerator, driver
from accumulation_harness.config import ConfigError, Device
from accumulation_harness.doctor import machine, operations, stages
from accumulation_harness.doctor.__main__ import main, told
from accumulation_harness.recipes import determinism

H100 = ("580.1", "NVIDIA H100", "81559 MiB", "Disabled", "Default")
ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-c")
ANSWER: Any = driver.answer  # the real one
OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    monkeypatch.setattr(driver, "answer", driver.Answer)


def fake(
    monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, available: bool, warns: str = "", visible: str | None = None
) -> None:
    def is_available() -> bool:
        if warns:
            warnings.warn(warns, stacklevel=1)
        return available

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("machine_has", "reason"),
    [
        ({"cuda": None, "available": False}, "a build without CUDA"),
        ({"cuda": "13.0", "available": False, "warns": OLD}, "driver on your system is too old"),
        ({"cuda": "13.0", "available": False, "visible": ""}, "CUDA_VISIBLE_DEVICES='' hides every device"),
        ({"cuda": "13.0", "available": False, "visible": "7", "files": ()}, "there is no driver"),
        ({"cuda": "13.0", "available": False}, "the driver shows no device (nvidia-smi shows 1)"),
        ({"cuda": "13.0", "available": False, "visible": "7"}, "CUDA_VISIBLE_DEVICES='7' leaves no device (nvidia-smi shows 1)"),
        ({"cuda": "13.0", "available": False, "visible": "abc"}, "CUDA_VISIBLE_DEVICES='abc' leaves no device"),
    ],
)
def test_why_a_gpu_is_not_seen(monkeypatch: pytest.MonkeyPatch, machine_has: dict[str, Any], reason: str) -> None:
    """Warnings are errors in tests: torch's own, of an old driver, is an answer and not raised."""
    monkeypatch.setattr(driver, "FILES", machine_has.pop("files", ("/",)))
    monkeypatch.setattr(driver, "answer", lambda: driver.Answer((H100,)))
    fake(monkeypatch, **machine_has)
    assert reason in str(accelerator.why_unavailable())
    with pytest.raises(ConfigError, match="device=cuda: expected cpu or auto"):
        determinism.choose_device(Device.cuda)
    assert determinism.choose_device(Device.auto).type == "cpu"
    assert reason in "\n".join(told(machine.describe()))


def test_a_cpu_build_beside_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, cuda=None, available=False)
    monkeypatch.setattr(driver, "answer", lambda: driver.Answer((H100,)))
    text = "\n".join(told(machine.describe()))
    assert "nvidia-smi shows: NVIDIA H100" in text and "this build of torch cannot use" in text


@pytest.mark.parametrize(
    ("tool", "version", "cards", "problem"),
    [
        ("echo '580.65, NVIDIA A, 80 MiB, [N/A], Default'; echo '580.65, B, 8 MiB, Disabled, Default'", "580.65", 2, None),
        ("printf '\\377\\376 no text\\n'", None, 0, "did not answer with 5 fields a card"),
        ("echo usage: nvidia-smi", None, 0, "'usage: nvidia-smi'"),
        ("echo 'a, b, c, d, e'", None, 0, "did not answer with 5 fields"),
        ("true", None, 0, None),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None, 0, "ended with code 9: 'NVIDIA-SMI has failed'"),
        ("exec sleep 20", None, 0, "did not answer within"),
    ],
)
def test_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, version: str | None, cards: int, problem: str | None
) -> None:
    """It is asked once, however long it hangs, and only what has the fields that were asked for is a card."""
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\necho asked >> '{tmp_path}/calls'\n{tool}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(driver, "answer", cache(ANSWER.__wrapped__))
    facts = machine.describe()
    assert (driver.version(), facts["driver"], len(facts["cards_of_driver"])) == (version, version, cards)
    text = "\n".join(told(facts))
    assert (problem in text) if problem else "cannot be asked" not in text
    assert (tmp_path / "calls").read_text() == "asked\n"


def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, cuda="13.0", available=True)
    properties = SimpleNamespace(name="Card", major=9, minor=0, total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 * 10**9, 80 * 10**9))


def test_two_devices_slow_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cards(monkeypatch)
    monkeypatch.setattr(machine, "tflops", lambda device, dtype: 0.5 if dtype == torch.float64 else 30.0)
    facts = machine.describe()
    text = "\n".join(told(facts))
    assert "GPU 1: Card, capability 9.0, 70.0 of 80.0 GB free" in text and "2 GPU(s) can be used" in text
    assert "float64 is slow here" in text and "make gpu: about" in text
    for known, is_less in ((facts, True), ({**facts, "tflops": {"float64": 40.0}}, False), ({}, True)):
        sweep = next(one for one in stages.on_a_gpu(Path("out"), known) if one.name == "sweep")
        assert ("algebra_steps=5" in sweep.command) == is_less


def test_a_card_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    two_cards(monkeypatch)

    def refuse(*_: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    monkeypatch.setattr(machine, "tflops", lambda device, dtype: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    text = "\n".join(told(machine.describe()))
    assert "GPU 1: it does not answer (CUDA error: out of memory)" in text and "cuDNN CUDA error: out of memory" in text


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_all_stages_together_end_within_half_an_hour(rate: float) -> None:
    chosen = [stages.doctor(Path("out")), *stages.on_a_gpu(Path("out"), {"tflops": {"float64": rate}})]
    assert sum(stage.seconds for stage in chosen) < 30 * 60


def test_every_stage_runs_and_the_archive_has_the_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = stages.Work(tmp_path / "gpu")
    trial = tmp_path / "gpu-trials" / "gpu" / "one"
    trial.mkdir(parents=True)
    (trial / "failed.json").write_text(json.dumps({"error": "Traceback\nOutOfMemoryError: no"}))
    work.run(stages.Stage(name="last", command=[*PYTHON, "raise SystemExit(1)"], accepted=(0, 1)))
    assert work.code == 0
    work.run(stages.Stage(name="first", command=[*PYTHON, "print('bad end'); raise SystemExit(3)"]))
    work.run(stages.Stage(name="absent", command=[str(tmp_path / "nothing")]))
    assert work.code == 1
    with tarfile.open(work.archive) as archive:
        summary = json.load(archive.extractfile("gpu/summary.json"))  # type: ignore[arg-type]
        assert {"gpu/first.log", "gpu/last.log"} <= set(archive.getnames())
    assert [(row["stage"], row["ok"], row["exit"]) for row in summary["stages"]] == [
        ("last", True, 1), ("first", False, 3), ("absent", False, None),
    ]  # fmt: skip
    assert summary["stages"][1]["tail"] == ["bad end"]
    assert summary["failed_trials"] == {"gpu/one": "OutOfMemoryError: no"}


def test_all_that_a_stage_has_started_ends_with_it(tmp_path: Path) -> None:
    hangs = stages.Stage(name="hangs", command=["sh", "-c", "sleep 77.25 & echo $!; wait"], seconds=0.5)
    row = stages.run(hangs, tmp_path / "log")
    child, *_, told = row["tail"]
    assert (row["ok"], row["exit"]) == (False, None) and told == "stopped after 0 s"
    wait_until(lambda: not is_alive(child))


KILLED = """
import os, sys, time
from pathlib import Path
from accumulation_harness.doctor import stages
from accumulation_harness.processes import run_command
def main():
    work = stages.Work(Path(sys.argv[1]))
    work.run(stages.Stage(name="one", command=[sys.executable, "-c", "print('found')"]))
    work.run(stages.Stage(name="two", command=["sh", "-c", "echo $$ > two; exec sleep 60"]))
run_command(main)
"""


def is_alive(process: str) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(happens: Callable[[], bool]) -> None:
    for _ in range(200):
        if happens():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 10 s")


def test_what_was_found_is_in_the_archive_when_it_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, in its second stage; which ends too."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/harness"}
    with subprocess.Popen([*PYTHON, KILLED, "gpu"], cwd=tmp_path, env=environment) as process:
        second = tmp_path / "two"
        wait_until(lambda: second.exists() and bool(second.read_text()))
        process.kill()
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"gpu/one.log", "gpu/summary.json"} <= set(archive.getnames())
    wait_until(lambda: not is_alive(second.read_text().strip()))


def test_the_other_stages_run_where_the_doctor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = stages.Stage(name="doctor", command=[*PYTHON, "raise RuntimeError('CUDA error: unspecified launch failure')"])
    seen: list[object] = []

    def others(out: Path, facts: object) -> list[stages.Stage]:
        seen.append(facts)
        return [stages.Stage(name="tests", command=[*PYTHON, "print('ran')"])]

    monkeypatch.setattr(stages, "doctor", lambda out: fails)
    monkeypatch.setattr(stages, "on_a_gpu", others)
    assert main(["gpu", "--out", str(tmp_path / "gpu")]) == 1
    told = capsys.readouterr().out
    assert "unspecified launch failure" in told and "tests: ok" in told and "please send it" in told and seen == [{}]
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        assert {"gpu/doctor.log", "gpu/tests.log"} <= set(archive.getnames())


def test_without_a_gpu_make_gpu_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--out", str(tmp_path / "gpu")]) == 2
    assert (tmp_path / "gpu.tar.gz").exists()
    assert "device=cuda: expected a CUDA device: " in capsys.readouterr().err


def test_operations_beside_float64() -> None:
    """A convolution that is wrong at 8 samples alone is seen there, and one that does not repeat."""
    rows = {(row["operation"], row["dtype"]): row for row in operations.measure(torch.device("cpu"))}
    assert len(rows) == 20 and all(row["same_bits_twice"] for row in rows.values())
    for dtype, least, most in (("float64", 0, 1e-15), ("float32", 1e-8, 1e-5), ("bfloat16", 1e-4, 1e-1)):
        assert least <= rows["convolution", dtype]["error_8"] <= most
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64)

    def odd(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w * (1 + 1e-3 * (len(x) == 8) * torch.rand((), dtype=x.dtype))

    with torch.random.fork_rng(devices=[]):
        row = operations._row(odd, x, torch.eye(3, dtype=torch.float64), torch.float64, torch.device("cpu"))
    assert row["error_64"] == 0 < 1e-6 < row["error_8"] and not row["same_bits_twice"]
