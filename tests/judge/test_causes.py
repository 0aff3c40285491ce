"""Where causes are decided: the fewer places name one, the fewer can name it wrongly."""

import ast
from collections import Counter
from pathlib import Path

import accumulation_harness
from accumulation_harness.judge.cause import MEANINGS, Cause

PACKAGE = Path(accumulation_harness.__file__).parent
MOST = 439  # places; a change may lower it


def test_places_that_name_a_cause_are_counted():
    assert MEANINGS.keys() == {*Cause}
    named = Counter(
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.name != "cause.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Cause"
    )
    assert named.keys() == {cause.name for cause in Cause}, "each is decided somewhere"
    assert named.total() <= MOST, named.most_common(5)
