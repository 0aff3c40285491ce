"""Files of a folder: what has no end and what is no folder is named."""

import os

import pytest

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.config.validation import validate
from accumulation_harness.workloads.text import read_corpus


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_has_no_end_is_no_text(what, tmp_path):
    (tmp_path / "a.txt").write_text("one line\nand another\n")
    if what == "pipe":
        os.mkfifo(tmp_path / "b.txt")
    else:
        (tmp_path / "b.txt").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a readable b\.txt \(Not a regular file\)"):
        read_corpus(str(tmp_path))


def test_an_address_is_refused_and_its_password_told_to_nobody():
    workload = WorkloadConfig(data=Data.text, model=Model.transformer)
    with pytest.raises(ConfigError, match="expected a local folder") as caught:
        validate(TrialConfig(workload=workload, norm=Norm.layer, data=DataConfig(root="https://me:s3cret@host/mnist")))
    assert "s3cret" not in repr(caught.value)
