"""The report: what its pages say of stored trials, that they stand alone, and what is said of what is missing."""

import csv
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.analysis.content import Section, Text, plain
from accumulation_harness.analysis.figures import style
from accumulation_harness.analysis.figures.judged import figure_algebra
from accumulation_harness.experiments.equivalence.answers import EXPERIMENT
from accumulation_harness.results.record import MOST_TOLD
from accumulation_harness.results.store import Store
from tests.stored_trials import store_grid, store_trial

CHROMIUM = Path("/usr/bin/chromium")
FETCHED = {"src", "href", "xlink:href", "srcset", "data", "poster", "action"}
NAME = '=1+1" onload="x<script>$\\frac{$\ttab\a' + "a" * 150


class Page(HTMLParser):
    """What a browser would fetch or run, the text, and the cells of the matrix."""

    def __init__(self, path):
        super().__init__()
        self.path, self.text = path, ""
        self.fetched = []
        self.tags = []
        self.cells = []
        self.ids = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.fetched += [value for name, value in values.items() if name in FETCHED and not value.startswith(("#", "data:"))]
        self.ids += [values["id"]] if "id" in values else []
        assert not any(name.startswith("on") for name in values)
        if tag == "td" and "title" in values:
            self.cells.append(values["class"].split()[0])

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def out(tmp_path):
    return tmp_path / "reports"


def make(results, out, experiment="equivalence"):
    """The page of an experiment."""
    assert report.main(["--results", str(results), "--out", str(out)]) == 0
    return page_of(out, experiment)


def page_of(out, experiment):
    return Page(out / "pages" / f"{plain(experiment)}.html")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Results and report: the grid of a question, sweeps of one's own with odd names, and two trials without a result."""
    folder = tmp_path_factory.mktemp("everything")
    results = folder / "results"
    store_grid(results)
    for norm, precision in ((norm, precision) for norm in ("batch", "group") for precision in ("float32", "float16")):
        store_trial(results, experiment="mine", norm=norm, precision=precision, clip_norm=0.5)
    for name in (NAME, "single"):
        store_trial(results, experiment=name)
    for path in results.glob("*/*/trial.json"):
        os.utime(path, None if path.parts[-3] == "mine" else (1.0, 1.0))
    store = Store(results)
    store.open_trial("equivalence", "left-half", {}).close()
    with pytest.raises(ZeroDivisionError), store.open_trial("equivalence", "raised", {}):
        raise ZeroDivisionError("<b>bold</b>")
    assert report.main(["--results", str(results), "--out", str(folder / "reports")]) == 0
    yield folder


def test_the_page_answers_in_numbers(everything):
    page = page_of(everything / "reports", "equivalence")
    assert "16 of 16 accumulated arms without BatchNorm are equivalent" in page.text
    explained = "8 of 8 BatchNorm arms are different, all explained exactly by batch statistics (largest oracle error 4e-15)"
    assert explained in page.text and "equivalent 12 of 12 times" in page.text and "The prediction held." in page.text
    # none, group, batch under adam and none under sgd in float32; none and batch in float16; N = 2, 4 and the null
    assert len(page.cells) == 6 * 3 and page.cells.count("explained") == 2 * 2 and page.cells.count("equivalent") == 18 - 4
    assert "in no number here: 2 of 14 trials" in page.text
    provenance = Page(everything / "reports/provenance.html").text
    assert "Trials without a result: 2" in provenance and "left-half" in provenance
    assert "<b>bold</b>" in provenance, "as text: nothing of a store is markup"


def test_the_entry_shows_the_newest_sweep_first_and_summarises_earlier_ones(everything):
    first, _, rest = Page(everything / "reports/index.html").text.partition("Other sweeps")
    assert "Your sweep “mine”" in first and NAME not in first and "Caveats" in first
    assert NAME in rest and "Caveats" not in rest
    mine, _, answers = first.partition("May I accumulate instead of a large batch?")
    assert "Caveats" in mine and "16 of 16 runs without BatchNorm" in answers
    assert "runs with BatchNorm are a different one, by " in answers


def test_claims_have_the_columns_of_the_contract(everything):
    with open(everything / "reports/claims.csv", newline="") as file:
        own = {row["id"]: row for row in csv.DictReader(file)}
    columns = "id source claim verdict condition measured threshold n experiment rule explanation recorded"
    assert " ".join(own["A1"]) == columns
    assert own["A1"]["recorded"] == "" and own["F4c"]["recorded"] == "2026-11-25 at cc2bf42", "measured here, and by full grids"
    assert own["F4c"]["verdict"] in ("confirmed", "refuted", "conditional", "undecided")
    assert own["A1"]["verdict"] == "conditional" and own["A1"]["experiment"] == "equivalence"
    assert float(own["A1"]["measured"]) == pytest.approx(4.1e-16), "the largest difference of an arm without BatchNorm"
    assert int(own["A1"]["n"]) == 20, "float16 repeats the algebra of float32"
    page = Page(everything / "reports/claims.html").text
    assert "64 claims" in page and "a different computation with it (8 of 8 arms)" in page


def test_pages_fetch_nothing_run_one_script_of_ours_and_every_link_leads_to_a_file(everything):
    pages = [Page(path) for path in (everything / "reports").rglob("*.html")]
    base = (Path(report.__file__).parent / "templates/base.html.j2").read_text()
    (ours,) = re.findall(r"<script>.*?</script>", base, re.S)
    for page in pages:
        assert not {"iframe", "object", "embed", "base", "img"} & set(page.tags)
        assert page.tags.count("script") == 1 and ours in page.path.read_text()
        assert len(page.ids) == len(set(page.ids))
        assert not re.search(r"@import|url\((?!#|[\'\"]?data:)", page.path.read_text())
    led = [(page.path.parent, one.partition("#")[0]) for page in pages for one in page.fetched]
    named = {"pages/equivalence.html", "claims.html", "tables/mine.csv", "tables/mine.tex", "../index.html"}
    assert {name for _, name in led} >= named
    assert [name for folder, name in led if not (folder / name).is_file()] == []


def test_every_figure_is_a_file_and_on_its_page(everything):
    figures = [*(everything / "reports/figures").iterdir()]
    for path in figures:
        ElementTree.parse(path)
        assert re.fullmatch(r"[\w.-]+", path.name)
    shown = [page_of(everything / "reports", name) for name in ("equivalence", "mine", "single", NAME)]
    assert len(figures) == sum(page.tags.count("svg") for page in shown) > 7
    assert shown[0].path.read_text().count('role="img" aria-label="') == shown[0].tags.count("svg") == 6


def test_a_name_is_text_everywhere(everything):
    assert all(NAME in page.text for page in (page_of(everything / "reports", NAME), Page(everything / "reports/index.html")))
    assert plain("claims") != "claims", "which has a page of its own"


def test_a_sweep_of_ones_own_carries_its_caveats(everything):
    text = page_of(everything / "reports", "mine").text
    assert "This is a property of the model, not a fault of the loop." in text  # BatchNorm
    assert "(batch_statistics): an exact simulation of it gives 4 of 4 differences." in text
    assert "BatchNorm; adam; float32, float16. Accumulation is a different computation" in text
    assert "0.0513 at N = 2, 0.026 at N = 4" in text  # 1 - 0.9^(1/2), 1 - 0.9^(1/4)
    assert "Adam: the state is updated once per window" in text and "In float16, unscale once per window" in text
    table = (everything / "reports/tables/mine.csv").read_text().splitlines()
    assert table[0].startswith("workload,norm,optimizer,precision,accumulation_steps,verdict") and len(table) == 1 + 2 * 2 * 2
    assert "\\toprule" in (everything / "reports/tables/mine.tex").read_text()
    alike = page_of(everything / "reports", "single")
    assert "nothing in this sweep has to be avoided" in alike.text and alike.cells == ["equivalent"] * 3
    assert "simulation of it" not in alike.text and "not a fault of the loop" not in alike.text
    assert "Clipping (clip_norm 0.5) was active in" in text and "Clipping (" not in alike.text
    assert "single," in (everything / "reports/verdicts.csv").read_text()


def test_a_different_arm_changes_headline_and_matrix_and_the_same_arms_give_the_same_bytes(results, out, make_trial):
    wrong = {"verdict": "different", "cause": "unexplained", "explained": False, "algebra_error": 0.3}
    make_trial(norm="group", change={("accumulated", 4): wrong})
    make_trial(norm="batch", precision="float64")
    page = make(results, out)
    assert "1 of 2 accumulated arms without BatchNorm are equivalent" in page.text
    assert "; 1 different." in page.text and "The prediction did not hold." in page.text
    assert page.cells.count("different") == 1 and "gradients differ" in page.text  # among what could not be explained
    again = style.to_svg(figure_algebra(load.from_store(results)))
    assert again == (out / "figures/equivalence-algebra.svg").read_bytes()


def test_a_store_without_results_says_why(results, out, capsys):
    assert report.main(["--results", str(results), "--out", str(out)]) == 1
    assert "no trials in" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), Store(results).open_trial("equivalence", "raised", {}):
        raise ZeroDivisionError("of all things")
    assert report.main(["--results", str(results), "--out", str(out)]) == 1
    assert "1 failed" in (message := capsys.readouterr().err) and "of all things" in message
    assert not out.exists()


def test_step_rows_that_are_lost_cost_a_curve_and_not_the_page(results, out, make_trial, monkeypatch, capsys):
    """They are counted by experiment; a section that needs them, or cannot be made at all, says so in its place."""
    names = [make_trial(experiment="equivalence", seed=seed) for seed in range(MOST_TOLD + 1)]

    def curve(material):
        return Section("A curve", (Text(f"{len(material.read_steps(names[:1]))} rows"),))

    monkeypatch.setattr("accumulation_harness.experiments.equivalence.answers.EXPERIMENT", replace(EXPERIMENT, sections=(curve,)))
    assert "A curve\n72 rows" in make(results, out).text
    for name in names:
        Store(results).folder("equivalence", name).joinpath("steps.parquet").unlink()
    kept = make_trial(experiment="mine")
    capsys.readouterr()
    monkeypatch.setattr("accumulation_harness.analysis.sections.figures.figure_algebra", lambda arms: {}["seeds"])
    text = make(results, out).text
    assert "(curve) could not be made from the results that are there: no finished trial has step rows" in text
    err = capsys.readouterr().err
    (told,) = [line for line in err.splitlines() if "Step rows" in line]
    assert f"trials of equivalence {len(names)} of {len(names)}; the first is equivalence/" in told and kept not in told
    said = "(algebra) could not be made from the results that are there: no finished trial has seeds."
    assert said in page_of(out, "mine").text
    assert "accumulation-harness report: mine: the section algebra could not be made" in err


def title_of(page, probe, tmp_path, width):
    """The title of a page in a real browser, where a probe has set it."""
    probed = tmp_path / "probed.html"
    script = f"<script>addEventListener('load', () => {{{probe}}})</script>"
    probed.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    where = (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000")
    command = [str(CHROMIUM), *quiet, *where, "--dump-dom", probed.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return re.search(r"<title>(.*?)</title>", dom)[1]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium")
@pytest.mark.parametrize("width", [1200, 500])  # chromium has no narrower window
def test_a_real_browser_draws_every_figure_no_wider_than_the_window(everything, tmp_path, width):
    probe = """
        document.querySelectorAll("details").forEach((one) => { one.open = true; });
        const boxes = [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
        const drawn = boxes.filter(box => box.width > 300 && box.height > 100).length;
        document.title = `${drawn} ${document.documentElement.scrollWidth}`"""
    drawn, widest = map(int, title_of(everything / "reports/pages/equivalence.html", probe, tmp_path, width).split())
    assert drawn == 6 and widest <= width


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="no chromium")
def test_a_click_sorts_the_claims_and_a_word_filters_them(everything, tmp_path):
    probe = """
        const table = document.querySelector("table.claims"), rows = () => [...table.tBodies[0].rows];
        const ids = () => rows().filter(row => row.id).map(row => row.id), before = ids();
        table.querySelector("th").click();
        const up = ids();
        table.querySelector("th").click();
        const down = ids(), follows = rows().every((row, place) => row.matches(".why") === (place % 2 === 1));
        const field = table.closest(".scroll").previousElementSibling;
        field.value = "GroupNorm";
        field.oninput();
        const shown = rows().filter(row => !row.hidden).length;
        document.title = [before.length, up[0], down[0], follows, 0 < shown && shown < before.length].join(" ")"""
    assert title_of(everything / "reports/claims.html", probe, tmp_path, 1200) == "64 A1 G10 true true"
