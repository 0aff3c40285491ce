from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from accumulation_harness.analysis import report
from accumulation_harness.analysis.content import Section, Text, plain
from accumulation_harness.analysis.question import Material
from accumulation_harness.experiments.equivalence.answers import EXPERIMENT
from accumulation_harness.results.record import MOST_TOLD
from accumulation_harness.results.store import Store

CHROMIUM = Path("/usr/bin/chromium")
FETCHED = {"src", "href", "xlink:href", "srcset", "data", "poster", "action"}


class Page(HTMLParser):
    """What a browser would fetch or run, the text, and the cells of the matrix."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.text = ""
        self.ids: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.fetched += [value for name, value in values.items() if name in FETCHED and not value.startswith(("#", "data:"))]
        self.ids += [values["id"]] if "id" in values else []
        assert not any(name.startswith("on") for name in values)
        if tag == "td" and "title" in values:
            self.cells.append(values["class"].split()[0])

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "reports"


def make(results: Path, out: Path, experiment: str = "equivalence") -> Page:
    """The page of an experiment."""
    write(results, out)
    return Page((out / "pages" / f"{plain(experiment)}.html").read_text())


def write(results: Path, out: Path) -> list[Page]:
    """Every page, the entry first."""
    assert report.main(["--results", str(results), "--out", str(out)]) == 0
    return [Page(path.read_text()) for path in [out / "index.html", *sorted(out.rglob("*.html"))]]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_page_answers_in_numbers(results: Path, out: Path, grid: list[str]) -> None:
    page = make(results, out)
    assert "16 of 16 accumulated arms without BatchNorm are equivalent" in page.text
    assert (
        "8 of 8 BatchNorm arms are different, all explained exactly by batch statistics (largest oracle error 4e-15)" in page.text
    )
    assert "equivalent 12 of 12 times" in page.text
    assert "The prediction held." in page.text
    # none, group, batch under adam and none under sgd in float32; none and batch in float16; N = 2, 4 and the null
    assert len(page.cells) == 6 * 3
    assert page.cells.count("explained") == 2 * 2
    assert page.cells.count("equivalent") == 18 - 4


def test_a_different_arm_changes_headline_and_matrix(results: Path, out: Path, make_trial) -> None:
    wrong = {"verdict": "different", "cause": "unexplained", "explained": False, "algebra_error": 0.3}
    make_trial(norm="group", change={("accumulated", 4): wrong})
    make_trial(norm="batch")
    page = make(results, out)
    assert "1 of 2 accumulated arms without BatchNorm are equivalent" in page.text
    assert "; 1 different." in page.text
    assert "The prediction did not hold." in page.text
    assert page.cells.count("different") == 1
    assert "gradients differ" in page.text  # among what could not be explained


def test_the_page_fetches_and_runs_nothing(results: Path, out: Path, grid: list[str]) -> None:
    for page in write(results, out):
        assert not {"script", "iframe", "object", "embed", "base", "img"} & set(page.tags)
        assert len(page.ids) == len(set(page.ids))
    for path in out.rglob("*.html"):
        assert not re.search(r"@import|url\((?!#|[\'\"]?data:)", path.read_text())


def test_every_link_leads_to_a_file_that_was_written(results: Path, out: Path, make_trial) -> None:
    make_trial()
    make_trial(experiment="mine", norm="batch")
    write(results, out)
    led = [(path, one.partition("#")[0]) for path in out.rglob("*.html") for one in Page(path.read_text()).fetched]
    assert {name for _, name in led} >= {
        "pages/equivalence.html",
        "claims.html",
        "tables/mine.csv",
        "tables/mine.tex",
        "../index.html",
    }
    assert [name for path, name in led if not (path.parent / name).is_file()] == []


def test_every_figure_is_a_file_and_on_the_page(results: Path, out: Path, grid: list[str]) -> None:
    page = make(results, out)
    figures = sorted(path.name for path in (out / "figures").iterdir())
    assert len(figures) == page.tags.count("svg") == 7
    for name in figures:
        ElementTree.parse(out / "figures" / name)
    assert (out / "pages/equivalence.html").read_text().count('role="img" aria-label="') == len(figures)


def test_same_store_same_bytes(results: Path, tmp_path: Path, grid: list[str]) -> None:
    make(results, tmp_path / "first")
    make(results, tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_empty_store(results: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--results", str(results), "--out", str(out)]) == 1
    assert "no trials in" in capsys.readouterr().err
    assert not out.exists()


def test_a_store_of_failures_says_why(results: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Store(results).open_trial("equivalence", "raised", {}):
        raise ZeroDivisionError("of all things")
    assert report.main(["--results", str(results), "--out", str(out)]) == 1
    assert "1 failed" in (message := capsys.readouterr().err)
    assert "of all things" in message
    assert not out.exists()


def test_trials_without_result_are_on_the_page(results: Path, out: Path, make_trial) -> None:
    make_trial()
    store = Store(results)
    store.open_trial("equivalence", "left-half", {}).close()
    with pytest.raises(ZeroDivisionError), store.open_trial("equivalence", "raised", {}):
        raise ZeroDivisionError("<b>bold</b>")
    page = make(results, out)
    assert "in no number here: 2 of 3 trials" in page.text
    provenance = Page((out / "provenance.html").read_text())
    assert "Trials without a result: 2" in provenance.text
    assert "left-half" in provenance.text
    assert "<b>bold</b>" in provenance.text  # as text: nothing of a store is markup


def test_lost_step_rows_cost_a_curve_and_not_the_page(results: Path, out: Path, grid: list[str]) -> None:
    Store(results).folder("equivalence", grid[0]).joinpath("steps.parquet").unlink()
    assert "cannot be read" in make(results, out).text


def test_trials_that_are_kept_without_step_rows_are_counted_by_experiment(
    results: Path, out: Path, make_trial, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [make_trial(experiment="equivalence", seed=seed) for seed in range(MOST_TOLD + 1)]
    kept = make_trial(experiment="momentum")
    for name in names:
        Store(results).folder("equivalence", name).joinpath("steps.parquet").unlink()
    make(results, out)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "Step rows" in line]
    assert f"trials of equivalence {len(names)} of {len(names)}; the first is equivalence/" in told and kept not in told


def test_a_section_of_step_rows_says_that_there_are_none(
    results: Path, out: Path, grid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def curve(material: Material) -> Section:
        return Section("A curve", (Text(f"{len(material.read_steps(grid[:1]))} rows"),))

    monkeypatch.setattr("accumulation_harness.experiments.equivalence.answers.EXPERIMENT", replace(EXPERIMENT, sections=(curve,)))
    assert "A curve\n72 rows" in make(results, out).text
    Store(results).folder("equivalence", grid[0]).joinpath("steps.parquet").unlink()
    assert "(curve) could not be made from the results that are there: no finished trial has step rows" in make(results, out).text


def test_experiments_without_a_question_are_shown(results: Path, out: Path, make_trial) -> None:
    make_trial(experiment="single")
    page = make(results, out, "single")
    entry = Page((out / "index.html").read_text())
    assert "Your trials" in page.text and "Your trials" in entry.text
    assert page.cells == entry.cells == ["equivalent"] * 3
    assert not (out / "claims.html").exists()  # no claim has data
    assert "single," in (out / "verdicts.csv").read_text()


@pytest.mark.parametrize("name", ['1" onload="x', "<script>", "$\\frac{$", "claims", "a" * 200, "=1+1", "tab\tbell\a"])
def test_a_name_is_text_everywhere(name: str, results: Path, out: Path, make_trial) -> None:
    make_trial(experiment=name)
    for page in (make(results, out, name), Page((out / "index.html").read_text())):
        assert name in page.text
        assert "script" not in page.tags
        assert len(page.ids) == len(set(page.ids))
    for path in (out / "figures").iterdir():
        ElementTree.parse(path)
        assert re.fullmatch(r"[\w.-]+", path.name)


def test_a_part_that_cannot_be_made_says_so_in_its_place(
    results: Path, out: Path, make_trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trial()
    monkeypatch.setattr("accumulation_harness.analysis.sections.figures.figure_algebra", lambda arms: {}["seeds"])
    text = "(algebra) could not be made from the results that are there: no finished trial has seeds."
    assert text in make(results, out).text
    assert "accumulation-harness report: equivalence: the section algebra could not be made" in capsys.readouterr().err


def test_one_seed_float64_and_one_n(results: Path, out: Path, make_trial) -> None:
    make_trial(precision="float64", norm="batch")
    assert make(results, out).cells.count("explained") == 2


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium")
@pytest.mark.parametrize("width", [1200, 500])  # chromium has no narrower window
def test_in_a_real_browser(results: Path, out: Path, tmp_path: Path, grid: list[str], width: int) -> None:
    """The browser draws every figure, no wider than the window."""
    make(results, out)
    probe = """<script>addEventListener("load", () => {
        document.querySelectorAll("details").forEach((one) => { one.open = true; });
        const boxes = [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
        const drawn = boxes.filter(box => box.width > 300 && box.height > 100).length;
        document.title = `drawn ${drawn} page ${document.documentElement.scrollWidth}`})</script>"""
    measured = tmp_path / "measured.html"
    measured.write_text((out / "pages/equivalence.html").read_text().replace("</body>", probe + "</body>"))
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    where = (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000")
    command = [str(CHROMIUM), *quiet, *where, "--dump-dom", measured.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>drawn (\d+) page (\d+)</title>", dom)
    assert found is not None
    assert int(found[1]) == 7
    assert int(found[2]) <= width


def test_the_entry_answers_first(results: Path, out: Path, grid: list[str]) -> None:
    write(results, out)
    entry = Page((out / "index.html").read_text())
    first, _, rest = entry.text.partition("How to read it")
    assert "May I accumulate instead of a large batch?" in first and "16 of 16 runs without BatchNorm" in first
    assert "Is accumulation the same computation as the large batch?" in rest


def test_the_newest_sweep_is_shown_and_earlier_ones_are_summarised(results: Path, out: Path, grid: list[str], make_trial) -> None:
    folders = {name: Store(results).folder(name, make_trial(experiment=name)) for name in ("a_try", "waves")}
    for newest, older in (("waves", "a_try"), ("a_try", "waves")):
        os.utime(folders[older] / "trial.json", (1.0, 1.0))
        os.utime(folders[newest] / "trial.json")
        write(results, out)
        first, _, rest = Page((out / "index.html").read_text()).text.partition("Earlier sweeps")
        assert f"“{newest}”" in first and f"“{older}”" not in first and "Caveats" in first
        assert f"“{older}”" in rest and "Caveats" not in rest.partition("What to know")[0] and "May I accumulate" in rest


def test_a_sweep_of_ones_own_carries_its_caveats(results: Path, out: Path, make_trial) -> None:
    for precision in ("float32", "float16"):
        for norm in ("batch", "group"):
            make_trial(experiment="mine", norm=norm, precision=precision)
    text = Page((out / "index.html").read_text()).text if write(results, out) else ""
    assert "Your sweep “mine”" in text
    assert "This is a property of the model, not a fault of the loop." in text  # BatchNorm
    assert "4 of 4 that differ by batch_statistics are what an exact simulation of it gives." in text
    assert "BatchNorm; adam; float32, float16. Accumulation is another computation" in text
    assert "0.0513 at N = 2, 0.026 at N = 4" in text  # 1 - 0.9^(1/2), 1 - 0.9^(1/4)
    assert "Adam: the state is updated once per window" in text and "In float16, unscale once per window" in text
    table = (out / "tables/mine.csv").read_text().splitlines()
    assert table[0].startswith("workload,norm,optimizer,precision,accumulation_steps,verdict") and len(table) == 1 + 2 * 2 * 2
    assert "\\toprule" in (out / "tables/mine.tex").read_text()


def test_a_sweep_without_a_difference_says_that_nothing_has_to_be_avoided(results: Path, out: Path, make_trial) -> None:
    make_trial(experiment="mine")
    page = make(results, out, "mine")
    assert (
        "nothing in this sweep has to be avoided" in page.text
        and "simulation of it" not in page.text
        and "not a fault of the loop" not in page.text
    )


def test_clipping_has_a_caveat_where_it_is_set(results: Path, out: Path, make_trial) -> None:
    make_trial(experiment="mine")
    assert "Clipping (" not in make(results, out, "mine").text
    make_trial(experiment="mine", seed=1, clip_norm=0.5)
    assert "Clipping (clip_norm 0.5) was active in" in make(results, out, "mine").text
