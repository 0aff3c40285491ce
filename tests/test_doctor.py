"""What a report of a bug shows, here and on odd machines that are faked."""

import warnings

import pytest
import torch

from accumulation_harness.system import accelerator, doctor, driver

H100 = "580.1"
OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


def test_it_names_torch_the_system_and_why_there_is_no_gpu(capsys):
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert torch.__version__.partition("+")[0] in told and "Python version" in told and "No GPU can be used" in told


@pytest.mark.parametrize(
    ("cuda", "warns", "visible", "files", "reason"),
    [
        (None, "", None, ("/",), "a build without CUDA"),
        ("13.0", OLD, None, ("/",), "driver on your system is too old"),
        ("13.0", "", "", ("/",), "CUDA_VISIBLE_DEVICES='' hides every device"),
        ("13.0", "", "7", (), "there is no driver"),
        ("13.0", "", None, ("/",), "the driver shows no device (nvidia-smi shows 1)"),
        ("13.0", "", "7", ("/",), "CUDA_VISIBLE_DEVICES='7' leaves no device (nvidia-smi shows 1)"),
    ],
)
def test_why_a_gpu_is_not_seen(monkeypatch, cuda, warns, visible, files, reason):
    """Warnings are errors in tests: torch's own, of an old driver, is an answer and not raised."""

    def is_available():
        if warns:
            warnings.warn(warns, stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(driver, "FILES", files)
    monkeypatch.setattr(driver, "answer", lambda: driver.Answer((H100,)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert reason in (accelerator.why_unavailable() or "") and any(reason in line for line in doctor.machine_lines())
