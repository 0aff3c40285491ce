"""Walls between the rooms (the folders of the tree), followed through every import, and no circle anywhere."""

import ast
import os
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "harness"
OURS = ("accumulation_harness", "hydra_plugins")

WALLS = {  # room -> what none of its modules may reach, however many imports it takes
    "accumulation_harness.referee": ("accumulation_harness.recipes", "accumulation_harness.measure", "torch.optim"),
    "accumulation_harness.judge": ("torch", "accumulation_harness.measure"),
    "accumulation_harness.results": ("torch",),
    "accumulation_harness.observe": (
        "accumulation_harness.audit",
        "accumulation_harness.watch",
        "accumulation_harness.recipes",
        "accumulation_harness.measure",
        "accumulation_harness.workloads",
    ),
    "accumulation_harness.audit": (
        "accumulation_harness.recipes",
        "accumulation_harness.measure",
        "accumulation_harness.workloads",
    ),
    "accumulation_harness.audit.compare": ("accumulation_harness.audit.observe",),
    "accumulation_harness.audit.rules": ("accumulation_harness.audit.observe", "torch"),
    "accumulation_harness.watch": (
        "accumulation_harness.recipes",
        "accumulation_harness.measure",
        "accumulation_harness.workloads",
        "accumulation_harness.audit",
    ),
    "accumulation_harness.affected": ("torch", "numpy", "rich", "accumulation_harness.audit", "accumulation_harness.measure"),
    "accumulation_harness.lint": ("torch", "numpy", "rich", "accumulation_harness.audit", "accumulation_harness.measure"),
    "accumulation_harness.sweep.run": ("torch",),
    "accumulation_harness.analysis": ("accumulation_harness.experiments", "torch"),
    "accumulation_harness.config.questions": ("torch", "pandas", "accumulation_harness.experiments"),
    "accumulation_harness.measure.trial": ("accumulation_harness.experiments",),
    "accumulation_harness.measure.studies": ("accumulation_harness.experiments",),
}
LAZY = {  # imported inside a function, when a trial is about to run: a wall ends there
    ("accumulation_harness.sweep.experiment", "accumulation_harness.system.accelerator"),
    ("accumulation_harness.sweep.experiment", "accumulation_harness.measure.studies"),
}


QUESTIONS = {  # file of a question's folder -> what it must not reach
    "__init__": ("torch", "pandas"),
    "answers": ("torch", "accumulation_harness.recipes", "accumulation_harness.measure", "accumulation_harness.measure.trial"),
}


def _files(folder):
    """Below a folder, also through links to the folders at the top of the tree."""
    return sorted(
        Path(here, name) for here, _, names in os.walk(folder, followlinks=True) for name in names if name.endswith(".py")
    )


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules():
    paths = [path for folder in OURS for path in _files(ROOT / folder)]
    return {name_of(path): path for path in paths}


def imports(tree):
    """Dotted names of modules, also those of imports inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inside & modules().keys() or {node.module}


@cache
def graph():
    return {name: frozenset(imports(ast.parse(path.read_text()))) for name, path in modules().items()}


def reached(name):
    """Everything that a module reaches, and by which way."""
    ways, waiting = {name: (name,)}, [name]
    while waiting:
        one = waiting.pop()
        for other in graph().get(one, ()):
            if other not in ways and (one, other) not in LAZY:
                ways[other] = (*ways[one], other)
                waiting.append(other)
    return ways


def inside(names, room):
    return [name for name in names if name == room or name.startswith(f"{room}.")]


def room_of(name):
    """The folder of a module; where a folder has folders, its files are rooms by themselves."""
    folder = name.rpartition(".")[0]
    has_folders = any(other.startswith(f"{folder}.") and path.name == "__init__.py" for other, path in modules().items())
    return name if has_folders or modules()[name].name == "__init__.py" else folder


@pytest.mark.parametrize("room", WALLS)
def test_walls(room):
    behind = [name for name in inside(modules(), room) if ".notebooks." not in name]  # which read the answers too
    assert behind, f"there is no {room}"
    for name in behind:
        _hold(name, WALLS[room])


@pytest.mark.parametrize("file", QUESTIONS)
def test_walls_inside_a_question(file):
    paths = [path for path in (ROOT / "accumulation_harness" / "experiments").glob(f"*/{file}.py")]
    assert len(paths) > 20
    for path in paths:
        _hold(name_of(path), QUESTIONS[file])


def _hold(name, wall):
    ways = reached(name)
    for forbidden in wall:
        for found in inside(ways, forbidden):
            pytest.fail(f"{name} must not reach {forbidden}: {' -> '.join(ways[found])}")


def test_what_is_lazy_is_imported_inside_a_function():
    for name, other in LAZY:
        top = {found for node in ast.parse(modules()[name].read_text()).body for found in _top(node)}
        assert other in graph()[name] and other not in top


def _top(node):
    return set(imports(ast.Module([node], []))) if isinstance(node, (ast.Import, ast.ImportFrom)) else set()


def test_no_module_imports_itself_through_others():
    order(graph())


def test_no_room_imports_itself_through_others():
    rooms = {}
    for name, others in graph().items():
        rooms.setdefault(room_of(name), set()).update(room_of(other) for other in others if other in graph())
    order({room: others - {room} for room, others in rooms.items()})


def order(arrows):
    try:
        return list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        pytest.fail("a circle: " + " -> ".join(error.args[1]))


def test_the_lint_reaches_only_the_standard_library():
    """A pre-commit hook installs it without its dependencies."""
    for name in inside(modules(), "accumulation_harness.lint"):
        foreign = {other.partition(".")[0] for other in reached(name)} - sys.stdlib_module_names - {"accumulation_harness"}
        assert not foreign, f"{name} reaches {foreign}"
        ours = {other for other in reached(name) if other in modules()} - set(inside(modules(), "accumulation_harness.lint"))
        light = ("judge.cause", "judge.sarif", *(f"system.{own}" for own in ("address", "enums", "files", "github", "packages")))
        assert ours <= {f"accumulation_harness.{name}" for name in light}


def test_only_tracking_knows_wandb():
    users = {name for name, others in graph().items() if inside(others, "wandb")}
    assert users == {"accumulation_harness.results.tracking"}


def test_files_of_the_user_have_one_writer():
    """Others write what a run has for itself, or go on with the summary that GitHub gives."""
    writes = re.compile(r"\.write_(text|bytes)\(|open\([^)\n]*[\"'][wax]b?[\"']")
    writers = {path.name for path in modules().values() if writes.search(path.read_text())}
    assert writers == {"files.py", "scratch.py", "reproduction.py", "github.py"}


def test_the_walls_would_hold(monkeypatch):
    """A way through two rooms is found, and so is a circle."""
    detour = {**graph(), "accumulation_harness.judge.verdict": frozenset({"accumulation_harness.referee.oracle"})}
    monkeypatch.setattr(f"{__name__}.graph", lambda: detour)
    assert reached("accumulation_harness.judge.verdict")["torch"][1] == "accumulation_harness.referee.oracle"
    with pytest.raises(pytest.fail.Exception, match="a circle: "):
        order({"a": {"b"}, "b": {"a"}})
