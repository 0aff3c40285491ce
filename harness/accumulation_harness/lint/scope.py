"""A function's own statements: who holds what, which tests lead to a place, and where a name got its value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Body = Loop | ast.Module | Function  # what runs once for each micro-batch: a loop's body, or a method that takes one step
LOOPS = (ast.For, ast.AsyncFor, ast.While)
OTHERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one, in the order of the text, without the inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, OTHERS):
            yield from own(child)


class Scope:
    """The statements of a module or a function."""

    def __init__(self, node: ast.Module | Function) -> None:
        self.node = node
        self.nodes = list(own(node))
        self.parents: dict[ast.AST, ast.AST] = {
            child: parent for parent in (node, *self.nodes) if not isinstance(parent, OTHERS) or parent is node
            for child in ast.iter_child_nodes(parent)
        }  # fmt: skip

    def calls(self, within: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls of the scope, or of one of its nodes."""
        nodes = self.nodes if within is None else own(within)
        return [node for node in nodes if isinstance(node, ast.Call)]

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each (child, parent) on the way from a node up to the scope."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            node = parent

    def loop(self, node: ast.AST) -> Loop | None:
        """Return the innermost loop whose body holds the node."""
        for child, parent in self.above(node):
            if isinstance(parent, LOOPS) and child in parent.body:
                return parent
        return None

    def tests(self, node: ast.AST, loop: ast.AST) -> list[tuple[ast.If, bool]]:
        """Return the `if`s that decide in an iteration of a loop whether a node is reached, and with which answer.

        An `if` that ends in `continue` decides on everything below it.
        """
        found: list[tuple[ast.If, bool]] = []
        for child, parent in self.above(node):
            if isinstance(parent, ast.If) and child is not parent.test:
                found.append((parent, child in parent.body))
            for block in ("body", "orelse", "finalbody"):
                before = getattr(parent, block, None)
                if isinstance(before, list) and child in before:
                    for one in before[: before.index(child)]:
                        if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue):
                            found.append((one, False))
            if parent is loop:
                break
        return found

    def excluded(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in the two branches of an `if`, so that only one of them runs."""
        here, there = (
            {parent: child in parent.body for child, parent in self.above(node) if isinstance(parent, ast.If)}
            for node in (one, other)
        )
        return any(there[branch] is not here[branch] for branch in here.keys() & there.keys())

    def values(self, name: str, before: int, within: ast.AST | None = None) -> list[ast.stmt | ast.withitem]:
        """Return the statements above a line that give a name (`loss`, `self.loss`) a value."""
        found: list[ast.stmt | ast.withitem] = []
        for node in self.nodes if within is None else own(within):
            if isinstance(node, ast.withitem):
                if dotted_target(node.optional_vars, name) and node.context_expr.lineno <= before:
                    found.append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.lineno < before:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(dotted_target(target, name) for target in targets):
                    found.append(node)
        return found


def dotted_target(target: ast.AST | None, name: str) -> bool:
    """Whether an assignment to `target` gives `name` a value, alone or in a tuple."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(dotted_target(item, name) for item in target.elts)
    return isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) and ast.unparse(target) == name


def stored(loop: ast.AST) -> set[str]:
    """Return the names that change while a loop runs."""
    names = set()
    for node in own(loop):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def scopes(tree: ast.Module) -> Iterator[Scope]:
    """Yield the module and each function in it."""
    yield Scope(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield Scope(node)
