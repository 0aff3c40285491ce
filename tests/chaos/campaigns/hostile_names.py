"""Markup, formulas, paths and control characters in every text of stored trials: nothing gets out of page, figures and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

from accumulation_harness.analysis.tables import FORMULA
from accumulation_harness.results.record import StoreError, read_trial, write_record
from tests.chaos.campaign import Broken
from tests.chaos.reports import Said, reported, status_of
from tests.stored_trials import store_trial

PAYLOADS = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)", '" onload="alert(1)', "</style><b>",
    "]]><x>", "-->", "&lt;i&gt;", "javascript:alert(1)", "{{ 7 * 7 }}", "{% include 'x' %}", "=1+1", "+1+1", "-2+3", "@SUM(1)",
    "\t=1+1", "\r=1+1", "\n=cmd|' /C calc'!A0", "\uff1d1+1", "../../escape", "/etc/passwd", "..", "a/b", "x\0y", "\x1b[2J",
    "\u202e",
    "$\\frac{$", "$x$", "%s%n", "a" * 300, "\ud800", "\uffff", "", " ", "reading", "_hidden", "NaN", "1e999", "💥", "a;=1+1",
)  # fmt: skip
CHECKED = ("experiment", "trial", "precision", "verdict")  # texts that make a trial damaged
FORBIDDEN = {"script", "img", "iframe", "object", "embed", "form", "input", "x", "i", "base"}


def attack(rng: Random, folder: Path) -> str:
    """Store two trials, put payloads into one, and look at all that is made of them."""
    results, out = folder / "in" / "results", folder / "in" / "reports"
    store_trial(results, experiment="equivalence")
    name = rng.choice(["equivalence", *(one for one in PAYLOADS if is_folder(one))])
    faults = {rng.choice(["no_division", rng.choice(PAYLOADS)]): True} if rng.random() < 0.3 else None
    try:
        trial = store_trial(results, experiment=name, seed=1, faults=faults)
        target = results / name / trial
        record = {key: value for key, value in read_trial(target).record.items() if key != "sha256"}
    except (StoreError, UnicodeEncodeError):  # a fault of such a name
        return "refused by the store"
    kept = {key: record.pop(key) for key in ("format", "experiment", "trial", "steps", "steps_sha256")}
    record["measurements"] = (
        [{"study": rng.choice(PAYLOADS), "arm": rng.choice(PAYLOADS), "x": 1.0}] if rng.random() < 0.3 else []
    )
    spared = rng.choice(((), CHECKED))
    write_record(target, kept | poisoned(rng, record, rng.choice((0.05, 0.3, 1.0)), spared))
    before = sorted(path for path in folder.rglob("*"))
    status = status_of(results)
    said = reported(results, out)
    if any("\x1b" in one.text or "\0" in one.text for one in (status, said)):
        raise Broken("control characters reach the terminal")
    outside = [path for path in folder.rglob("*") if path not in before and out not in (path, *path.parents)]
    if outside := [path for path in outside if path.name != ".lock"]:
        raise Broken(f"written outside of the report: {outside}")
    check(said)
    return "named as damaged" if trial in said.page and "damaged" in said.page else "shown as text"


def is_folder(name: str) -> bool:
    """Whether an experiment can have this name."""
    plain = name.isascii() and len(name) < 200
    return plain and not name.startswith(".") and not set("/\0") & set(name) and bool(name)


def poisoned(rng: Random, value: Any, share: float, spared: Collection[str]) -> Any:
    """The record with some of its texts replaced."""
    if isinstance(value, dict):
        return {name: item if name in spared else poisoned(rng, item, share, spared) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(rng, item, share, spared) for item in value]
    return rng.choice(PAYLOADS) if isinstance(value, str) and rng.random() < share else value


def check(said: Said) -> None:
    """Raise Broken where a payload became more than text."""
    for path in said.out.rglob("*.html"):
        Page(path, said.out).feed(path.read_text(encoding="utf-8"))
    for path in sorted((said.out / "figures").glob("*")):
        if any(one.tag.rpartition("}")[2] in FORBIDDEN for one in ElementTree.parse(path).iter()):
            raise Broken(f"markup in {path.name}")
    for name, content in said.tables.items():
        for row in csv.reader(io.StringIO(content.decode(), newline="")):
            for cell in row:
                if cell.startswith(FORMULA) and not is_number(cell):
                    raise Broken(f"{name}: a cell that computes: {cell!r}")


def is_number(cell: str) -> bool:
    """Whether the cell is one number."""
    try:
        float(cell)
    except ValueError:
        return False
    return cell.strip() == cell


class Page(HTMLParser):
    """Raises Broken about what our template never writes."""

    def __init__(self, path: Path, out: Path) -> None:
        super().__init__()
        self.path, self.out = path, out
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at one tag."""
        if tag in FORBIDDEN:
            raise Broken(f"markup on the page: <{tag}>")
        for name, value in attrs:
            text = value or ""
            if name.startswith("on") or (name in ("href", "src", "xlink:href") and not self.leads_to_ours(text)):
                raise Broken(f"an attribute on the page: {name}={text!r}")
            if name == "id" and (not text or text.split() != [text] or text in self.ids):
                raise Broken(f"an id that is none, or twice: {text!r}")
            self.ids |= {text} if name == "id" else set()

    def leads_to_ours(self, link: str) -> bool:
        """Whether a link stays on the page, or leads to a file of the report."""
        if link.startswith(("#", "data:,")):
            return True
        target = (self.path.parent / link.partition("#")[0]).resolve()
        return target.is_relative_to(self.out.resolve()) and target.is_file()
