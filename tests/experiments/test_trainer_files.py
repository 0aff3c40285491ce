"""Every audit of scoreboard/trainers.mk: its files, its functions, its record and its rows in the table."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TRAINERS = Path("scoreboard")
RECORDS = Path("docs/findings/audits")


@dataclass(frozen=True)
class Call:
    """One `$(call audit, ...)` of the makefile."""

    target: str
    environment: str
    file: str
    functions: tuple[str, ...]
    name: str


def calls() -> list[Call]:
    text = (TRAINERS / "trainers.mk").read_text()
    variables: dict[str, str] = {}
    for name, sign, value in re.findall(r"^(\w+) (:=|\+=) (.*)$", text, re.M):
        variables[name] = f"{variables[name]} {value}" if sign == "+=" else value
    found, target = [], ""
    for line in text.splitlines():
        if head := re.match(r"(audit-[\w-]+): \$\(TRAINERS\)", line):
            target = head[1]
        if call := re.match(r"\t\$\(call audit,([^,]*),([^,]*),([^,]*),([^,]*),", line):
            functions = re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], call[3]).split()
            found.append(Call(target, call[1], call[2], tuple(functions), call[4]))
    return found


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name)
def test_an_audit_of_the_makefile_is_complete(call: Call) -> None:
    assert (TRAINERS / "requirements" / f"{call.environment}.txt").is_file()
    tree = ast.parse((TRAINERS / f"{call.file}.py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(call.functions) <= defined
    table = (TRAINERS / "README.md").read_text()
    assert f"`{call.target}`" in table or f"make {call.target}`" in table
    record = RECORDS / f"{call.name}.json"
    if record.is_file():
        held = json.loads(record.read_text())
        assert held["name"] == call.name
        assert {arm["function"] for arm in held["arms"]} | {p["function"] for p in held["problems"]} <= set(call.functions)


def test_every_record_has_an_audit() -> None:
    assert {path.stem for path in RECORDS.glob("*.json")} <= {call.name for call in calls()}


def test_every_environment_is_pinned() -> None:
    for path in (TRAINERS / "requirements").glob("*.txt"):
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in pin for pin in pins), path
        assert any(pin.startswith("torch==") for pin in pins), path
