"""What is certain is mended: a change is tried on the text, and kept where the lint then tells this hit no more, and no other."""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.source import DEFINITIONS, LOOPS, Source
from accumulation_harness.system.files import read_file, write_atomically

MOST = 20  # changes of a file
Lines = list[str]


def mended(text: str, found: Callable[[Source], list[Hit]]) -> str:
    """Change the text of a module where a change is certain.

    Args:
        text: Source of a module.
        found: Source -> hits.

    Returns:
        The text, changed where a change is certain.
    """
    for _ in range(MOST):
        source = Source(text)
        before = found(source)
        for hit in before:
            left = {new: _left(new, before, found) for new in _changes(source, hit)} if hit.sure else {}
            best = min(left, key=left.__getitem__, default="")
            if left.get(best, len(before)) < len(before):
                text = best
                break
        else:
            break
    return text


def patch(path: Path, before: str, after: str) -> Iterator[str]:
    """Yield the lines of a patch, as `patch -p0` takes it.

    Args:
        path: The file.
        before: Its text.
        after: The text that it shall have.

    Yields:
        Lines of a unified diff.
    """
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), str(path), str(path))
    yield from (line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def write(path: Path, before: str, after: str) -> None:
    """Write a text in the file's own encoding and with its own ends of lines.

    Args:
        path: The file.
        before: Its text.
        after: The text that it shall have.

    Raises:
        ValueError: The file has several kinds of line ends.
    """
    old = read_file(path)
    encoding, _ = tokenize.detect_encoding(io.BytesIO(old).readline)
    newline = "\r\n" if b"\r\n" in old else "\n"
    if before.replace("\n", newline).encode(encoding) != old:
        raise ValueError("its lines end in several ways: nothing is changed")
    if after != before:
        write_atomically(path.resolve(), after.replace("\n", newline).encode(encoding))  # a link stays one


def _left(text: str, before: list[Hit], found: Callable[[Source], list[Hit]]) -> int:
    """Return the number of hits of a changed text; as many as before where it has one of a cause that was not told."""
    try:
        after = found(Source(text))
    except (SyntaxError, ValueError, RecursionError):
        return len(before)
    is_none_new = Counter(hit.cause for hit in after) <= Counter(hit.cause for hit in before)
    return len(after) if is_none_new else len(before)


def _changes(source: Source, hit: Hit) -> Iterator[str]:
    """Yield the text with each change that may mend a hit."""
    how = {
        Cause.loss_not_divided: _divided,
        Cause.gradients_cleared_in_window: _cleared,
        Cause.clip_per_micro_batch: _clipped,
        Cause.short_window_divided_by_n: _shortened,
    }.get(hit.cause)
    calls = (one for one in words.inside(source.tree, ast.Call) if (one.lineno, one.col_offset + 1) == (hit.line, hit.column))
    call = next(calls, None)
    if how is not None and call is not None:
        yield from filter(None, how(_Page(source), call))


class _Page:
    """A text with the places of its nodes: what is around a statement, and how it is written elsewhere."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.lines = source.text.split("\n")
        self.above: dict[ast.AST, ast.AST] = {}
        self.block: dict[ast.AST, list[ast.stmt]] = {}
        for node in ast.walk(source.tree):
            self.above |= dict.fromkeys(ast.iter_child_nodes(node), node)
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list):
                    self.block |= dict.fromkeys(block, block)

    def around(self, node: ast.AST) -> list[ast.AST]:
        """Return what is around a node, from inside, with its function or the module at the end."""
        found = [self.above[node]]
        while not isinstance(found[-1], (*DEFINITIONS, ast.Module)):
            found.append(self.above[found[-1]])
        return found

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that an expression is in."""
        return next(one for one in self.around(node) if isinstance(one, ast.stmt))

    def loop(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost loop around a node."""
        return next((one for one in self.around(node) if isinstance(one, LOOPS)), None)

    def steps(self, node: ast.AST) -> list[ast.Call]:
        """Return the steps of optimizers inside a node."""
        found = []
        for call in words.inside(node, ast.Call):
            of = words.receiver(call)
            is_named = words.OPTIMIZER.search(words.last(of)) or words.SCALER.search(words.last(of))
            if words.last(call.func) == "step" and (is_named or words.dotted(of) in self.source.cleared):
                found.append(call)
        return found

    def boundary(self, node: ast.AST) -> list[ast.stmt]:
        """Return the statements that step, in the block of the first of them behind a statement, or behind the loop around it."""
        for one in (node, self.loop(node)):
            if not isinstance(one, ast.stmt) or one not in self.block:
                continue
            block = self.block[one]
            found = [other for other in block[block.index(one) + 1 :] if self.steps(other)]
            while found and isinstance(found[0], ast.If) and not any(map(self.steps, found[0].orelse)):
                found = [other for other in found[0].body if self.steps(other)]
            if found:
                return found
        return []

    def numbers(self, node: ast.AST) -> list[str]:
        """Return what is the number of micro-batches around a node: a step is taken modulo it, or is compared with it."""
        function = self.around(node)[-1]
        found: list[ast.expr] = []
        rows: set[str] = set()  # numbers of rows
        for one in (
            one for around in (function, self.source.class_of(function)) if around is not None for one in ast.walk(around)
        ):
            match one:
                case ast.If(test=test) if self.steps(one):
                    found += [inner.right for inner in words.inside(test, ast.BinOp) if isinstance(inner.op, ast.Mod)]
                case ast.BinOp(op=ast.Mod(), right=number):
                    found += [number] * self.source.is_number(number)
                case ast.Compare(left=left, comparators=others):
                    found += [other for other in (left, *others) if self.source.is_number(other)]
                case ast.Call(func=ast.Name(id="range" | "trange"), args=[number]):
                    found += [number] * self.source.is_number(number)
                case ast.Call(args=[*_, last]) if words.last(one.func) in ("range", "split", "chunk"):
                    rows.add(ast.unparse(last))
        near = {ast.unparse(one) for one in words.inside(function, ast.expr)}
        own = dict.fromkeys(map(ast.unparse, found))
        return [one for one in own if one not in rows and (one.startswith("self.") or one in near)]

    # changes -------------------------------------------------------------------------------------------------------------------

    def replaced(self, changes: Iterable[tuple[ast.expr, str]]) -> str:
        """Return the text with expressions, each on one line, exchanged; "" where one is not."""
        lines = list(self.lines)
        for node, new in sorted(changes, key=lambda change: (change[0].lineno, change[0].col_offset), reverse=True):
            if node.end_lineno != node.lineno:
                return ""
            line = lines[node.lineno - 1].encode()
            lines[node.lineno - 1] = (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode()
        return "\n".join(lines)

    def moved(self, statements: list[ast.stmt], to: list[tuple[int, str]], written: Callable[[Lines], Lines] = list) -> str:
        """Return the text with statements and the comments above them taken to other places, each a line and its margin.

        "" where a statement shares its lines, or is all that its block holds.
        """
        lines: list[str | None] = [*self.lines]
        taken: Lines = []
        for one in statements:
            first, end = self.first(one), one.end_lineno or one.lineno
            own, margin = self.lines[first - 1 : end], self.margin(one)
            behind = self.lines[end - 1].encode()[one.end_col_offset :].decode().strip()
            inside = [node for node in words.inside(one, (ast.Constant, ast.JoinedStr)) if node.lineno != node.end_lineno]
            if margin.strip() or behind[:1] not in ("", "#") or inside or len(self.block[one]) == len(statements):
                return ""
            taken += [line.removeprefix(margin) for line in own]
            lines[first - 1 : end] = [None] * len(own)
        for line, margin in sorted(to, reverse=True):
            lines[line - 1 : line - 1] = [margin + one for one in written(taken)]
        return "\n".join(line for line in lines if line is not None)

    def margin(self, node: ast.stmt) -> str:
        """Return what stands before a statement on its line."""
        return self.lines[node.lineno - 1].encode()[: node.col_offset].decode()

    def first(self, node: ast.stmt) -> int:
        """Return the first line of a statement and of the comments above it."""
        line = node.lineno
        while line > 1 and self.lines[line - 2].startswith(self.margin(node) + "#"):
            line -= 1
        return line

    def before(self, node: ast.stmt) -> tuple[int, str]:
        """Return the place above a statement."""
        return self.first(node), self.margin(node)

    def behind(self, node: ast.stmt) -> tuple[int, str]:
        """Return the place below a statement."""
        return (node.end_lineno or node.lineno) + 1, self.margin(node)


def _divided(page: _Page, call: ast.Call) -> Iterator[str]:
    """Divide what is differentiated by what may be the number of micro-batches."""
    loss = words.receiver(call)
    if isinstance(loss, ast.Call) and words.last(loss.func) == "scale" and loss.args:
        loss = loss.args[0]
    elif call.args:
        loss = call.args[0]
    if loss is None:
        return
    written = ast.get_source_segment(page.source.text, loss) or ""
    whole = written if isinstance(loss, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({written})"
    for number in page.numbers(call):
        yield page.replaced([(loss, f"({whole} / {number})" if loss is words.receiver(call) else f"{whole} / {number}")])


def _cleared(page: _Page, call: ast.Call) -> Iterator[str]:
    """Take what clears behind the step; and before the loop, for what an epoch leaves over."""
    statement = page.statement(call)
    block = page.block[statement]
    place = block.index(statement)
    clears = [*itertools.takewhile(_clears, block[place:])]
    clears = [*itertools.takewhile(_clears, block[:place][::-1])][::-1] + clears
    steps, loop = page.boundary(statement), page.loop(call)
    if not clears or not steps or len(page.steps(page.around(call)[-1])) > sum(len(page.steps(one)) for one in steps):
        return  # or several optimizers, whose backwards may reach what the others hold
    rest = page.block[steps[-1]]
    rest = rest[rest.index(steps[-1]) + 1 :]
    is_done = any(map(_clears, rest))
    is_flat = loop is None or loop in page.around(steps[0])
    updates = [one for one in rest if _calls(one, "update")]
    to = [page.behind([*steps, *updates][-1])] if is_flat and not is_done else []
    if loop is not None and (is_flat or not is_done) and not _accumulate(page, call):
        above = page.block[loop][: page.block[loop].index(loop)]
        if not any(map(_clears, above)):
            to.append(page.before(loop))
    yield page.moved(clears, to)


def _calls(statement: ast.stmt, name: str) -> bool:
    """Whether a statement is a call of a method of this name."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and words.last(statement.value.func) == name


def _clears(statement: ast.stmt) -> bool:
    return _calls(statement, "zero_grad")


def _accumulate(page: _Page, node: ast.AST) -> str:
    """Return what `accumulate` is called of, of accelerate's around a node."""
    for one in page.around(node):
        for item in one.items if isinstance(one, ast.With) else ():
            if words.last(getattr(item.context_expr, "func", None)) == "accumulate":
                return ast.unparse(item.context_expr.func.value)  # type: ignore[attr-defined]
    return ""


def _clipped(page: _Page, call: ast.Call) -> Iterator[str]:
    """Take what clips before the step, where nothing else needs what it returns."""
    clip = page.statement(call)
    for one in page.around(clip):
        if not isinstance(one, ast.If) or any(
            words.last(inner.func) in ("backward", "step") for inner in words.inside(one, ast.Call)
        ):
            break
        clip = one
    steps = page.boundary(clip)
    of = _accumulate(page, clip)
    if of and isinstance(page.above[clip], ast.With):
        inner = "\t" if page.margin(clip).endswith("\t") else "    "
        yield page.moved(
            [clip], [page.before(clip)], lambda lines: [f"if {of}.sync_gradients:", *(inner + line for line in lines)]
        )
    given = {one.id for one in words.inside(clip, ast.Name) if isinstance(one.ctx, ast.Store)}
    near = {one for node in (clip, *(page.block[steps[0]] if steps else ())) for one in ast.walk(node)}
    asked = {one.id for one in words.inside(page.around(clip)[-1], ast.Name) if isinstance(one.ctx, ast.Load) and one not in near}
    is_direct = isinstance(page.above[clip], LOOPS) or any(map(page.steps, page.block[clip]))
    if not steps or given & asked or not is_direct or of:
        return
    yield page.moved([clip], [page.before(steps[0])])
    (step, *_) = page.steps(steps[0])
    if words.SCALER.search(words.last(words.receiver(step))) and step.args:
        unscale = f"{ast.unparse(words.receiver(step) or step)}.unscale_({ast.unparse(step.args[0])})"
        yield page.moved([clip], [page.before(steps[0])], lambda lines: [unscale, *lines])


def _shortened(page: _Page, call: ast.Call) -> Iterator[str]:
    """Divide the last window of an epoch by what it holds, where the loop counts and knows how many micro-batches there are."""
    loop = page.loop(call)
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=index), _]),
            iter=ast.Call(func=ast.Name(id="enumerate"), args=[over, *start]) as iter,
        ):
            start += [one.value for one in iter.keywords]
        case ast.For(target=ast.Name(id=index), iter=ast.Call(func=ast.Name(id="range"), args=[over])):
            start = []
        case _:
            return
    place = f"({index} - {ast.unparse(start[0])})" if start and ast.unparse(start[0]) != "0" else index
    tests = [one for one in words.inside(loop, ast.Compare) if index in words.names(one) and isinstance(one.ops[0], ast.Eq)]
    sides = [side for one in tests for side in (one.left, *one.comparators) if index not in words.names(side)]
    lengths = {
        ast.unparse(one): None
        for side in sides
        for one in (*words.inside(side, ast.Call), side)
        if not isinstance(one, ast.Constant)
    }
    of = f"len({ast.unparse(over)})"
    lengths |= {of: None} if of in page.source.text else {}
    for number in page.numbers(call):
        divisors = [
            one.right for one in words.inside(loop, ast.BinOp) if isinstance(one.op, ast.Div) and ast.unparse(one.right) == number
        ]
        divisors += [
            one.value
            for one in words.inside(loop, ast.AugAssign)
            if isinstance(one.op, ast.Div) and ast.unparse(one.value) == number
        ]
        if any(
            number in map(ast.unparse, (one.left, one.right))
            for one in words.inside(loop, ast.BinOp)
            if isinstance(one.op, ast.Mult)
        ):
            continue  # multiplied back for what is logged
        for length in lengths:
            yield page.replaced([(one, f"min({number}, {length} - {place} // {number} * {number})") for one in divisors])
