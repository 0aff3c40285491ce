"""Imports go one way: a module may import from its own level's lower neighbours and from levels below, never upwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = [
    {"config", "preloaded", "workers"},
    {"environment", "workloads", "micro_batch", "precision", "determinism", "gradients", "resampling", "diagnosis", "rows"},
    {"statistics", "recipe", "oracle", "record", "tracking", "progress", "verdict", "two_pass", "execution"},
    {"store", "sweeps", "causes", "faults", "by_hand", "remedies", "noise_scale", "sample_masks", "memory", "replicas"},
    {"lock_step"},
    {"update", "ranks"},
    {"probe"},
    {"algebra", "rounding", "poison"},
    {"ablation"},
    {"trial", "audit"},
    {"studies"},
    {"child"},
    {"experiment"},
    {"run"},
    {"__main__", "bench", "status", "plan"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
WITHOUT_TORCH = {
    "config",
    "resampling",
    "statistics",
    "diagnosis",
    "verdict",
    "store",
    "tracking",
    "run",
    "__main__",
    "experiment",
}


def module_imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Dotted names that a file imports; `top_only` leaves out imports inside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", files("harness"), ids=lambda path: str(path.relative_to(ROOT)))
def test_harness_imports_point_downwards(path: Path) -> None:
    parts = path.relative_to(ROOT / "harness").with_suffix("").parts
    own = parts[0]
    if own == "__init__":
        return
    assert own in LEVEL, f"{path.name} has no level: add it to the table above"
    for name in module_imports(path):
        if name.startswith("harness.") and (other := name.split(".")[1]) in LEVEL and other != own:
            assert LEVEL[other] < LEVEL[own], f"harness.{own} must not import harness.{other}"
        assert not name.startswith(("analysis", "experiments")), f"{path.name} must not import {name}"


def test_the_oracle_knows_nothing_of_the_recipe() -> None:
    assert not any("recipe" in name or "optim" in name for name in module_imports(ROOT / "harness" / "oracle.py"))


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_these_do_not_load_torch(name: str) -> None:
    assert not any(n.split(".")[0] == "torch" for n in module_imports(ROOT / "harness" / f"{name}.py", top_only=True))


@pytest.mark.parametrize(
    "path", files("analysis") + sorted((ROOT / "experiments").glob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_analysis_reads_results_and_never_trains(path: Path) -> None:
    allowed = {"config", "resampling", "statistics", "diagnosis", "verdict", "record", "store", "tracking"}
    for name in module_imports(path):
        assert name.split(".")[0] != "torch"
        assert not name.startswith("harness.") or name.split(".")[1] in allowed


def test_only_tracking_knows_wandb() -> None:
    users = [path.name for path in files("harness") if any(n.split(".")[0] == "wandb" for n in module_imports(path))]
    assert users in (["tracking.py"], [])
