"""A hook of mkdocs: one page per cause, and links to files of the repository that the site does not hold."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.remedy import patch
from accumulation_harness.system.address import documentation
from accumulation_harness.system.packages import versions

ROOT = Path(__file__).parents[1]
LOOPS = ROOT / "tests" / "audit" / "loops"
CAUSES = "causes"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Say which version this is and where it is read, and put the pages of the causes into the navigation, in their order."""
    config.site_url = documentation() or config.site_url
    config.copyright = versions()
    assert config.nav is not None
    for item in config.nav:
        for title, target in item.items():
            if target == f"{CAUSES}/":
                item[title] = [f"{CAUSES}/index.md", *({str(cause): f"{CAUSES}/{cause}.md"} for cause in Cause)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages of the causes."""
    files.append(File.generated(config, f"{CAUSES}/index.md", content=index()))
    for cause in Cause:
        files.append(File.generated(config, f"{CAUSES}/{cause}.md", content=page_of(cause)))
    remedies = files.get_file_from_path("remedies.md")
    assert remedies is not None
    files.remove(remedies)  # its sections are these pages
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links to `remedies.md#CAUSE` go to the cause's page; those to files outside of the site become their names."""
    here = Path(page.file.src_uri).parent

    def target(found: re.Match[str]) -> str:
        text, link = found.groups()
        path, _, anchor = link.partition("#")
        if not path or "://" in path:
            return found[0]
        if Path(path).name == "remedies.md":
            up = "../" * len(here.parts)
            return f"[{text}]({up}{CAUSES}/{f'{anchor}.md' if anchor else 'index.md'})"
        at = Path(os.path.normpath(ROOT / "docs" / here / path))
        if files.get_file_from_path(str((here / path).as_posix())) or (at.is_relative_to(ROOT / "docs") and at.is_file()):
            return found[0]
        if not at.exists():
            raise PluginError(f"{page.file.src_uri}: a link to {path}, which is not there")
        name = at.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") in (name, at.name) else f"{text} (`{name}`)"

    parts, last = [], 0
    for fence in FENCE.finditer(markdown):  # code is left alone
        parts += [LINK.sub(target, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(target, markdown[last:])])


def index() -> str:
    """All causes in a table."""
    head = (
        "# Causes and remedies\n\nThese names stand in every verdict: in the terminal, the tables, the reports and W&B. A cause "
        "is named when simulating exactly that bug reproduces the wrong gradient, or when it was seen directly.\n\n"
    )
    rows = [f"| [{cause}]({cause}.md) | {MEANINGS[cause].sentence} |" for cause in Cause]
    return head + "| cause | what is wrong |\n|---|---|\n" + "\n".join(rows) + "\n"


def page_of(cause: Cause) -> str:
    """What is wrong, what to change, loops that do it right, and who has it."""
    meaning = MEANINGS[cause]
    told, _, right = sections()[cause].partition("```diff")[0].partition("Right:")
    parts = [f"# {cause}", f"{meaning.sentence[0].upper()}{meaning.sentence[1:]}."]
    if meaning.of_the_model:
        parts.append("This is a property of the model or of its loss: no loop can change it.")
    parts += ["## What to change", told.strip(), *([f"```diff\n{lines}```"] if (lines := patch(cause)) else [])]
    loops = [source for name in re.findall(r"`([\w.]+)`", right) if (source := source_of(name))]
    if loops:
        parts += ["## Loops that do it right", "The tests audit each of them and require the verdict `equivalent`."]
        parts += [f"```python\n{source}\n```" for source in loops]
    if rows := [row for row in scoreboard() if f"`{cause}`" in row]:
        table = "\n".join(["| release | setting | finding |", "|---|---|---|", *rows])
        parts += ["## Released trainers in which it was found", table]
    return "\n\n".join(parts) + "\n"


@cache
def sections() -> dict[str, str]:
    """Cause -> its section of `remedies.md`."""
    parts = re.split(r"^## (\w+)\n", (ROOT / "docs" / "remedies.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def scoreboard() -> tuple[str, ...]:
    """Release, setting and finding of each audited setting, as rows of a table."""
    lines = (ROOT / "docs" / "findings" / "scoreboard.md").read_text().splitlines()
    rows = [re.split(r"(?<!\\)\|", line) for line in lines if line.startswith("| ") and not line.startswith("| release")]
    return tuple(f"|{'|'.join(row[1:4])}|" for row in rows)


@cache
def source_of(name: str) -> str:
    """Source of the loop `function` of right_loops.py, or `file.function`; empty for one that needs another package."""
    file, _, function = name.rpartition(".")
    path = LOOPS / f"{file or 'right_loops'}.py"
    if not path.exists():
        return ""
    text = path.read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
    return ast.get_source_segment(text, found[0]) or "" if found else ""
