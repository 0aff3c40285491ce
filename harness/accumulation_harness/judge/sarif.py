"""What is found as SARIF 2.1.0, for code scanning: by an audit at its function, by the lint at a line.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.system.address import documentation, page_of
from accumulation_harness.system.packages import version

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def text(tool: str, results: Sequence[dict[str, Any]], **run: Any) -> str:
    """Write a SARIF 2.1.0 document with one run.

    Args:
        tool: Name of the tool.
        results: SARIF results, whose `ruleId` is the name of a cause.
        **run: Further properties of the run.

    Returns:
        The document, with a rule for each cause.
    """
    causes = list(dict.fromkeys(Cause(one["ruleId"]) for one in results))
    known = {"version": version("accumulation-harness"), "informationUri": documentation()}
    driver = {"name": tool, "rules": list(map(_rule, causes)), **{name: value for name, value in known.items() if value}}
    numbered = [{**one, "ruleIndex": causes.index(one["ruleId"])} for one in results]
    whole = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", **run, "results": numbered}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [whole]}, indent=1, allow_nan=False)


def _rule(cause: Cause) -> dict[str, Any]:
    meaning = MEANINGS[cause]
    rule = {
        "id": cause,
        "name": "".join(word.capitalize() for word in cause.split("_")),
        "shortDescription": {"text": cause.replace("_", " ").capitalize()},
        "fullDescription": {"text": f"{meaning.sentence[0].upper()}{meaning.sentence[1:]}."},
        "help": {"text": meaning.remedy, "markdown": meaning.remedy},
        "defaultConfiguration": {"level": "error"},
    }
    return {**rule, "helpUri": page_of(cause)} if documentation() else rule  # a URI is absolute


def place(file: Path, root: Path, **region: int) -> dict[str, Any]:
    """Describe a location for SARIF.

    Args:
        file: The file.
        root: The root of the checkout.
        **region: Line and column numbers, by SARIF's names.

    Returns:
        A `location` object; the path is relative if the file is in the checkout.
    """
    found = {"uri": file.as_uri()}
    if file.is_relative_to(root):
        found = {"uri": quote(file.relative_to(root).as_posix(), errors="surrogateescape"), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": found, "region": region}}
