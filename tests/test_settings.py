"""The list of settings: complete, and the same in `--help` and in the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accumulation_harness import settings, usage
from accumulation_harness.config import HarnessConfig
from accumulation_harness.run import conf_dir


def names(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_setting_has_its_default_its_values_and_a_meaning() -> None:
    listed = {setting.name: setting for setting in settings.settings()}
    assert set(listed) == set(names(HarnessConfig())) - set(settings.HIDDEN)
    assert [name for name, one in listed.items() if not (one.default and one.choices and len(one.meaning) > 5)] == []
    assert listed["effective_batch"].default == "64" and listed["effective_batch"].meaning.startswith("B: samples")
    assert listed["accumulation_steps"].default == "[2,4,8,16]" and listed["accumulation_steps"].choices.startswith("a list")
    assert listed["norm"].choices == "as_is, none, batch, group, layer"
    assert listed["loss_scale"].meaning == "of float16, at the first step"  # at the end of its line, not the reason above it


def test_the_page_of_settings_is_the_one_that_is_made() -> None:
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text() == settings.markdown()


def test_help_has_every_setting_and_every_question(tmp_path: Path) -> None:
    text = usage.asked(["-h"], conf_dir())
    assert text is not None
    assert all(f"{name}=" in text for name in names(HarnessConfig()) if name not in settings.HIDDEN)
    for path in (conf_dir() / "experiment").glob("*.yaml"):
        assert f"  {path.stem} " in text and usage._question(path).rstrip(".")[-1:].isalnum() | ("?" in usage._question(path))
    assert usage.asked(["norm=batch"], conf_dir()) is None


def test_help_lists_what_an_own_folder_adds(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/widths.yaml").write_text("# @package _global_\n# Does width matter?\n")
    assert "Does width matter?" in (usage.asked(["--config-dir", str(tmp_path), "--help"], conf_dir()) or "")


def test_the_version_is_ours() -> None:
    assert (usage.asked(["--version"], conf_dir()) or "").startswith("accumulation-harness ")
