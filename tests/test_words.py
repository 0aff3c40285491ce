"""Public functions say what they take, return and raise; what a user can read is one list, and every sentence of it is one."""

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "harness" / "accumulation_harness"
LINKED = ("analysis", "experiments")  # rooms beside the package, which it links to


@cache
def trees():
    """Module -> its syntax tree."""
    roots = (PACKAGE, *(PACKAGE / name for name in LINKED))
    files = [path for root in roots for path in root.rglob("*.py") if "notebooks" not in path.parts]
    named = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    return {name: ast.parse(path.read_text()) for name, path in named.items()}


def public():
    """Functions of a module without an underscore; a decorator that makes a claim or a section of one gives the contract."""
    for module, tree in trees().items():
        for node in tree.body:
            made = isinstance(node, ast.FunctionDef) and {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
            if (
                isinstance(node, ast.FunctionDef)
                and not node.name.startswith(("_", "pytest_"))
                and not made & {"claim", "section"}
            ):
                yield module, node.name, node


def is_contract(function):
    said = ast.get_docstring(function) or ""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    gives = function.returns is not None and ast.unparse(function.returns) not in ("None", "NoReturn", "Iterator[None]")
    return (not every or "\nArgs:\n" in said) and (not gives or re.search(r"\n(Returns|Yields):\n", said) is not None)


def test_a_public_function_is_a_contract():
    every = list(public())
    assert len(every) > 800
    assert [(module, name) for module, name, function in every if not is_contract(function)] == []
    assert not is_contract(ast.parse('def f(x: int) -> int:\n    """Say one line."""').body[0])


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
