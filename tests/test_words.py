"""Public functions say what they take, return and raise; what a user can read is one list, and every sentence of it is one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "harness" / "accumulation_harness"
CONTRACTED = ("audit", "compare", "judge", "measure", "referee", "results")


@cache
def trees():
    """Module -> its syntax tree."""
    files = [path for path in PACKAGE.rglob("*.py") if "notebooks" not in path.parts]
    named = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    return {name: ast.parse(path.read_text()) for name, path in named.items()}


def room(module):
    return [*module.split("."), ""][1]


@cache
def shared():
    """Functions that another room imports, or that a room's `__init__` hands on, by module and name."""
    wanted = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in trees() and room(node.module) != room(module):
                wanted |= {(node.module, alias.name) for alias in node.names}
    return [
        pytest.param(node, id=f"{module}.{node.name}")
        for module, tree in trees().items()
        if room(module) in CONTRACTED
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and (module, node.name) in wanted
    ]


@pytest.mark.parametrize("function", shared())
def test_a_function_of_several_rooms_is_a_contract(function):
    said = ast.get_docstring(function) or ""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    assert not every or "\nArgs:\n" in said
    assert function.returns is None or ast.unparse(function.returns) == "None" or re.search(r"\n(Returns|Yields):\n", said)


def sentences():
    """Every text of more than four words that is no docstring, by module: f-strings with {} for what is filled in."""
    for module, tree in sorted(trees().items()):
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in parts | docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if len(text.split()) > 4:
                yield module, node.lineno, " ".join(text.split())


OF_NO_FIELD = re.compile(r"\bone's own\b|\b(?:is|are) told\b|\bat that b\b|\bthe texts\b|\bwould tell\b|\bmend(?:s|ed)?\b")


def test_what_a_user_reads_is_in_the_words_of_the_field():
    """`python -m tests.test_words` prints the list, to be read as a whole."""
    said = list(sentences())
    assert len(said) > 500
    assert [one for one in said if OF_NO_FIELD.search(one[-1])] == []


if __name__ == "__main__":
    for module, line, text in sentences():
        print(f"{module}:{line}: {text}")
