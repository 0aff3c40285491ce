"""The list of settings is complete, and the same in `--help` and in the documentation."""

from pathlib import Path

from accumulation_harness.config import HarnessConfig, to_dict, usage
from accumulation_harness.config.compose import conf_dir
from accumulation_harness.config.settings import markdown, settings

FILLED_IN = {"experiment", "workload.source", "optimizer.source"}


def names(values, prefix=""):
    for name, value in values.items():
        yield from names(value, f"{prefix}{name}.") if isinstance(value, dict) and value else (prefix + name,)


def test_every_setting_has_its_default_its_values_and_a_meaning():
    assert set(settings()) == set(names(to_dict(HarnessConfig()))) - FILLED_IN
    assert [name for name, one in settings().items() if not (one.written and one.values and len(one.meaning) > 4)] == []


def test_the_page_of_settings_is_the_one_that_is_made():
    assert (Path(__file__).parents[1] / "docs/settings.md").read_text() == markdown()


def test_help_has_every_setting_every_question_and_what_an_own_folder_adds(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/widths.yaml").write_text("# @package _global_\n# Does width matter?\n")
    text = usage.asked(["-h", "--config-dir", str(tmp_path)], conf_dir()) or ""
    assert [name for name in settings() if f"{name}=" not in text] == []
    assert "Does width matter?" in text
    assert [path.stem for path in (conf_dir() / "experiment").glob("*.yaml") if f"  {path.stem} " not in text] == []
    assert usage.asked(["norm=batch"], conf_dir()) is None
