"""The doctor on this machine, and on odd ones that are faked."""

from __future__ import annotations

import json
import sys
import tarfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import accelerator, driver
from harness.config import ConfigError, Device
from harness.doctor import machine, operations, stages
from harness.doctor.__main__ import main, told
from harness.recipes import determinism

OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    monkeypatch.setattr(driver, "query", lambda fields: [])
    driver.version.cache_clear()


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
        ({"cuda": "13.0", "available": False}, "there is no driver"),
    ],
)
def test_why_a_gpu_is_not_seen(monkeypatch: pytest.MonkeyPatch, machine_has: dict[str, Any], reason: str) -> None:
    """Warnings are errors in tests: torch's own, of an old driver, is an answer and not raised."""
    fake(monkeypatch, **machine_has)
    monkeypatch.setattr(driver, "FILES", ())
    assert reason in str(accelerator.why_unavailable())
    with pytest.raises(ConfigError, match="device=cuda: expected cpu or auto"):
        determinism.choose_device(Device.cuda)
    assert determinism.choose_device(Device.auto).type == "cpu"
    assert reason in "\n".join(told(machine.describe()))


def test_a_cpu_build_beside_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, cuda=None, available=False)
    monkeypatch.setattr(driver, "query", lambda fields: ["NVIDIA H100, 81559 MiB, Disabled, Default"])
    text = "\n".join(told(machine.describe()))
    assert "nvidia-smi shows: NVIDIA H100" in text and "this build of torch cannot use" in text


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
    sweep = next(one for one in stages.stages(Path("out"), facts) if one.name == "sweep")
    assert "algebra_steps=5" in sweep.command
    fast = {**facts, "tflops": {"float64": 40.0}}
    assert "algebra_steps=5" not in next(one for one in stages.stages(Path("out"), fast) if one.name == "sweep").command


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_all_stages_together_end_within_half_an_hour(rate: float) -> None:
    chosen = stages.stages(Path("out"), {"tflops": {"float64": rate}})
    assert sum(stage.seconds for stage in chosen) < 30 * 60


def test_every_stage_runs_and_the_archive_has_the_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu"
    trial = tmp_path / "gpu-trials" / "gpu" / "one"
    trial.mkdir(parents=True)
    (trial / "failed.json").write_text(json.dumps({"error": "Traceback\nOutOfMemoryError: no"}))
    python = [sys.executable, "-c"]
    chosen = [
        stages.Stage(name="first", command=[*python, "print('bad end'); raise SystemExit(3)"]),
        stages.Stage(name="hangs", command=[*python, "import time; time.sleep(60)"], seconds=0.5),
        stages.Stage(name="absent", command=[str(tmp_path / "nothing")]),
        stages.Stage(name="last", command=[*python, "raise SystemExit(1)"], accepted=(0, 1)),
    ]
    assert stages.run_all(out, chosen) == 1
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        summary = json.load(archive.extractfile("gpu/summary.json"))  # type: ignore[arg-type]
        assert {"gpu/first.log", "gpu/last.log"} <= set(archive.getnames())
    assert [(row["stage"], row["ok"], row["exit"]) for row in summary["stages"]] == [
        ("first", False, 3), ("hangs", False, None), ("absent", False, None), ("last", True, 1),
    ]  # fmt: skip
    assert summary["stages"][0]["tail"] == ["bad end"]
    assert summary["failed_trials"] == {"gpu/one": "OutOfMemoryError: no"}
    assert stages.run_all(out, chosen[3:]) == 0


def test_without_a_gpu_make_gpu_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 2
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
