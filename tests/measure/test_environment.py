"""What a result says of the code it was made with."""

import subprocess

import pytest
import torch

from accumulation_harness.measure import environment
from accumulation_harness.system import source

UNKNOWN = {"commit": None, "clean": None}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, in the place of the source tree."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "code.py").write_text("x = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "code.py"], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(source, "SOURCE", tmp_path)
    source.commit.cache_clear()
    yield tmp_path
    source.commit.cache_clear()


def test_the_commit_and_whether_the_tree_is_clean(checkout):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    assert source.commit() == {"commit": head, "clean": True}
    (checkout / "code.py").write_text("x = 2\n")
    assert source.commit()["clean"], "of the time when the process first asked"
    source.commit.cache_clear()
    assert environment.describe(torch.device("cpu")).items() >= {"commit": head, "clean": False}.items()


def test_no_commit_is_no_error(checkout, monkeypatch):
    monkeypatch.setattr(source, "SOURCE", checkout / "inside")
    assert source.commit() == UNKNOWN, "installed inside another project's repository"
    source.commit.cache_clear()
    monkeypatch.setattr(source, "SOURCE", checkout / "nowhere")
    assert source.commit() == UNKNOWN
    source.commit.cache_clear()
    monkeypatch.setattr(source, "SOURCE", checkout)
    monkeypatch.setenv("PATH", "")
    assert source.commit() == UNKNOWN, "without git"
