"""The documentation: its site builds strictly and loads nothing from elsewhere."""

import re
import shutil

import pytest

from accumulation_harness.judge.cause import MEANINGS, Cause
from tests.commands import ROOT, python

NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("How it works")[0]
LISTED = set(re.findall(r"^ {6}- .*: (\w+\.md)$", NAVIGATION, re.M)) - {"settings.md"}  # which is made of the declarations
FOR_USERS = sorted(LISTED | {"index.md", "gallery.md", "affected.md", "should_i_accumulate.md"})
DIALECT = re.compile(r"another computation|one's own|\b(?:is|are|was|be) told\b|at that b\b|\bthe texts\b")
SOMEWHERE = r"[^>]*\b(?:src|href)=\"?https?:"
LOADED = re.compile(rf"<(?:script|img|iframe)\b{SOMEWHERE}|<link\b[^>]*rel=\"?(?:stylesheet|preconnect){SOMEWHERE}")


def prose(text):
    """The words of a page, without its blocks of code and output."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).split()


@pytest.mark.parametrize("name", FOR_USERS)
def test_a_page_for_users_is_short_and_begins_with_a_question_and_an_example(name):
    text = (ROOT / "docs" / name).read_text()
    _, question, *rest = text.split("\n\n")
    assert question.startswith("*") and question.endswith("?*"), question
    assert len(prose(text)) <= 900
    before = re.split(r"^```", "\n\n".join(rest), maxsplit=1, flags=re.M)[0]
    assert len(before.split()) <= 80 or name in ("gallery.md", "performance.md"), "before the first example"
    assert re.search(r"^## ", text, re.M)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_a_page_speaks_the_language_of_the_field(page):
    found = DIALECT.findall((ROOT / page).read_text())
    assert not found


def test_all_pages_for_users_are_read_in_an_hour():
    assert len(FOR_USERS) >= 20
    assert sum(len(prose((ROOT / "docs" / name).read_text())) for name in [*FOR_USERS, "remedies.md"]) <= 12_000
    assert len((ROOT / "README.md").read_text().split()) <= 700


def build(root, site, code=0):
    return python("-m", "mkdocs", "build", "--strict", "--site-dir", site, cwd=root, code=code, NO_MKDOCS_2_WARNING="1")


@pytest.mark.slow
def test_the_site(tmp_path):
    pytest.importorskip("mkdocs")
    build(ROOT, tmp_path)
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    for cause in Cause:
        assert MEANINGS[cause].sentence.split(",")[0][1:20] in pages[f"causes/{cause}.html"]
    assert "judge_loop" in pages["api.html"] and "own_buffer" in pages["causes/gradients_cleared_in_window.html"]
    assert not {name for name, page in pages.items() if LOADED.search(page)}
    assert LOADED.search('<script async src="https://cdn.example/x.js">')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[gone](not_there.md)", "a link to not_there.md, which is not there"),
        ("[gone](audit.md#no-such-part)", "no-such-part"),
        ("[gone](remedies.md#no_cause)", "causes/no_cause.md"),
    ],
)
def test_a_broken_link_fails(line, told, tmp_path):
    pytest.importorskip("mkdocs")
    for name in ("harness", "analysis", "tests", "examples", "experiments", "scoreboard", "mkdocs.yml", "action.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "slurm.md").open("a") as page:
        page.write(f"\n{line}\n")
    done = build(tmp_path, tmp_path / "site", None)
    assert done.returncode != 0 and told in done.stderr, done.stderr
