"""A loop is followed as if it ran, with three micro-batches to a window and seven to an epoch: which call happens when.

Numbers, counters, flags and the weights of losses are computed; everything else is unknown. A test of something unknown is
answered by an assumption, the same wherever it is asked, and each function is followed under several assumptions.
"""

from __future__ import annotations

import ast
import re
from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from accumulation_harness.lint import words
from accumulation_harness.lint.source import Root, Source
from accumulation_harness.lint.values import (
    OPERATORS,
    Event,
    Function,
    Items,
    Length,
    Loss,
    Part,
    Thing,
    Value,
    arithmetic,
)

N, BATCHES, OUTER = Part(3), 7, 2  # micro-batches of a window, of an epoch; rounds of a loop around loops
DEEPEST, LONGEST, MOST = 6, 40, 20_000
INDEX = {"batch_idx", "batch_index", "step", "idx", "i", "it", "iteration", "batch_nb", "step_id", "_step_id"}
PASSED_ON = {
    "float",
    "to",
    "double",
    "contiguous",
    "squeeze",
    "requires_grad_",
    "clone",
    "type",
    "cuda",
    "half",
    "view",
    "reshape",
}
THROUGH = {
    "tqdm", "trange", "sum", "iter", "list", "tuple", "reversed", "track", "progress_bar", "abs", "round", "cycle", "compile",
    "dataparallel", "distributeddataparallel", "ddp", "fullyshardeddataparallel", "fsdp", "prepare", "prepare_model", "setup",
}  # fmt: skip
PLACE, FIRST = "accumulation_boundary", "accumulation_start"  # names of `step % N == 0` and `== 1` where the step is unknown
START = re.compile("start|step|iter")
FINITE = {"isnan": False, "isinf": False, "isfinite": True}


class Ended(Exception):
    """The run raises, exits, or is too long to be followed."""


class Left(Exception):
    """`return`, with its value."""

    def __init__(self, value: Value) -> None:
        self.value = value


class Run:
    """One way through a function, and what happened on it."""

    def __init__(
        self, source: Source, assumed: dict[str, bool], otherwise: str, not_finite: int | None = None, number: Part = N
    ) -> None:
        self.source, self.assumed, self.otherwise, self.not_finite, self.number = source, assumed, otherwise, not_finite, number
        self.events: list[Event] = []
        self.asked: dict[str, None] = {}  # what was assumed, in order
        self.passed_over: ast.expr | None = None
        self.heap: dict[str, Value] = {}  # attributes and items, by dotted names
        self.loops: list[tuple[ast.AST, int, bool]] = []
        self.entered_in: list[tuple[ast.AST, int, bool]] = []  # where accelerate's `accumulate` was entered last
        self.module: ChainMap[str, Value] = ChainMap({})
        self.hooks: list[Function] = []
        self.given: set[str] = set()  # parameters of what is called for each micro-batch
        self.evaluated = self.depth = self.entered = self.periods = self.engine_steps = self.engine_stepped = 0
        self.deferred = self.handling = self.unsure = self.entering = self.recording = False
        self.is_wide = False  # whether a boundary is further away than N
        self.counts = False  # whether it came by a number of micro-batches, or a boundary
        self.visited: set[ast.AST] = set()
        self.called_in: list[ast.AST] = []
        self.running: set[ast.AST] = set()  # what was handed to a framework and is followed now
        self.synchronised = self.forward_synchronised = True
        self.no_sync: list[tuple[str, ast.Call]] = []  # of which model, and by which call
        self.owners: dict[ast.expr, Value] = {}  # of attributes that were asked for
        self.forwards: dict[str, ast.Call | None] = {}  # since the last backward, by what is called; None: within `no_sync`
        self.asked_finite: Counter[ast.Call] = Counter()
        self.passed_in: list[tuple[ast.AST, int, bool]] | None = None  # the loops then

    @cached_property
    def of_kind(self) -> dict[str, list[Event]]:
        """What happened in loops, by its kind; asked once the run is over."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.kind] += [event] * bool(event.loops)
        return found

    @property
    def is_of_one(self) -> bool:
        """Whether a window holds one micro-batch."""
        return int(self.number) == 1

    @property
    def is_cut(self) -> bool:
        """Whether there was too much to follow."""
        return self.evaluated > MOST

    def follow(self, root: Root) -> None:
        """Follow the module's statements, or a function: again and again, if it takes a micro-batch."""
        try:
            if isinstance(root, ast.Module):
                self.block(root.body, self.module)
                return
            instance = None
            if (of := self.source.class_of(root)) is not None:
                instance = Thing("self", self.source.derived(of.name))
                for name in ("__init__", "setup"):
                    if (made := self.source.method(instance.of, name)) is not None and made is not root:
                        self.call(Function(made, self.module, instance), [], {}, is_root=True)
                    own = {words.last(one.target) for one in words.inside(root, ast.AugAssign)}  # what it counts by itself
                counted = {} if self.source.loops_over_backward(root) else dict.fromkeys(self.heap)
                self.heap |= {key: Thing(key) for key in counted if words.end(key) in self.source.counted - own}
            self.events.clear()
            for number in range(1 if self.source.loops_over_backward(root) else BATCHES):
                self.loops = [] if self.source.loops_over_backward(root) else [(root, number, False)]
                given = {one.arg: number for one in root.args.args if one.arg in INDEX and self.loops}
                self.given = {one.arg for one in root.args.args} if self.loops else set()
                returned = self.call(Function(root, self.module, instance), [], given, is_root=True)
                if isinstance(returned, Function) and isinstance(returned.node, ast.FunctionDef):
                    return self.hand(returned.node, returned)
                if self.source.is_automatic(root) and isinstance(returned, (Loss, Thing)):
                    self.backward(root.body[-1], returned, "automatic", divisor=self.number)
                    if (number + 1) % self.number == 0:
                        self.happen("step", root.body[-1], "automatic")
                        self.happen("clear", root.body[-1], "automatic")
                    if of is not None and (hook := self.source.method(of.name, "on_train_batch_end")) is not None:
                        self.call(Function(hook, self.module, instance), [], {})
        except (Ended, Left, RecursionError):
            pass

    # statements ----------------------------------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt], names: ChainMap[str, Value]) -> str:
        """Follow statements; return "", "break" or "continue"."""
        for statement in statements:
            if how := self.statement(statement, names):
                return how
        return ""

    def statement(self, node: ast.stmt, names: ChainMap[str, Value]) -> str:
        """Follow one statement."""
        match node:
            case ast.Expr():
                self.value(node.value, names)
            case ast.Assign():
                value = self.value(node.value, names)
                for target in node.targets:
                    self.give(target, value, names, is_literal=isinstance(node.value, ast.Constant))
            case ast.AnnAssign(value=ast.expr() as given):
                self.give(node.target, self.value(given, names), names, is_literal=isinstance(node.value, ast.Constant))
            case ast.AugAssign():
                before, by = self.value(node.target, names), self.value(node.value, names)
                if by == 1 and self.source.writes_rates:
                    self.happen("count", node, words.last(node.target))
                if words.last(node.target) == "grad" and isinstance(node.op, ast.Div):
                    self.happen("rescale", node, "")
                if isinstance(before, Thing) and by == 1:
                    before = 0  # a counter
                self.give(node.target, self.combined(node.op, before, by, node.value, node.value), names, is_literal=False)
            case ast.If():
                self.recording = self.source.matters(node)
                value = self.value(node.test, names)
                raises = isinstance(node.body[-1], ast.Raise)  # what is judged does not raise, nor leave early where it need not
                if isinstance(value, Thing) and self.source.ends_window(node):
                    value = replace(value, counts=True)
                is_free = not self.is_place(value) if isinstance(value, Thing) else raises
                stays = self.source.stays(node) if is_free else None
                answer = self.truth(value) if stays is None else stays
                self.recording = False
                has_period = (
                    isinstance(value, Thing) and value.name not in (PLACE, FIRST) and any(words.inside(node.test, ast.Mod))
                )
                self.periods += has_period
                try:
                    return self.block(node.body if answer else node.orelse, names)
                finally:
                    self.periods -= has_period
            case ast.For() | ast.AsyncFor() | ast.While():
                return self.loop(node, names)
            case ast.With() | ast.AsyncWith():
                return self.context(node, names)
            case ast.Try():
                return self.block(node.body + node.orelse + node.finalbody, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names[node.name] = Function(node, names)
            case ast.Return():
                raise Left(None if node.value is None else self.value(node.value, names))
            case ast.Raise():
                raise Left(Thing(words.text(node)[:80]))
            case ast.Break():
                return "break"
            case ast.Continue():
                return "continue"
        return ""

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, names: ChainMap[str, Value]) -> str:
        """Follow a loop."""
        most = OUTER if self.source.loops_over_backward(node) else BATCHES
        items = Items(None)
        if not isinstance(node, ast.While):
            items = self.items(self.value(node.iter, names))
            if items.cut:
                items = Items(None) if _steps(node) else replace(items, by_number=True)
            if items.values is None and self.is_window(node.iter):
                items = self.items(self.number)
            most = (
                most
                if items.values is None
                else min(len(items.values), OUTER if most == OUTER and not items.by_number else LONGEST)
            )
        most = min(most, 1) if self.source.is_plain(node) else most
        for number in range(LONGEST if isinstance(node, ast.While) and most > 1 else most):
            self.loops.append((node, number, items.by_number))
            try:
                if isinstance(node, ast.While):
                    if not self.goes_on(node.test, names, number < most):
                        break
                else:
                    self.give(
                        node.target, None if items.values is None else items.values[number], names, is_literal=False, of_loop=True
                    )
                if self.block(node.body, names) == "break":
                    return ""
            finally:
                self.loops.pop()
        return self.block(node.orelse, names)

    def goes_on(self, test: ast.expr, names: ChainMap[str, Value], few: bool) -> bool:
        """Whether a `while` goes on: where that is unknown, until there were as many rounds as in other loops."""
        self.entering = True
        try:
            value = self.value(test, names)
            return few if isinstance(value, Thing) or isinstance(test, ast.Constant) else self.truth(value)
        finally:
            self.entering = False

    def context(self, node: ast.With | ast.AsyncWith, names: ChainMap[str, Value]) -> str:
        """Follow `with`: accelerate's `accumulate`, `no_sync`, apex's `scale_loss`."""
        before = len(self.no_sync)
        for item in node.items:
            value = self.value(item.context_expr, names)
            name = words.end(value.name) if isinstance(value, Thing) else ""
            call = value.at if name and value.at is not None else item.context_expr
            if name == "accumulate":
                self.entered += 1
                self.counts = True
                if self.loops and self.entered_in == self.loops:
                    self.happen("entered", call, name)
                self.entered_in = list(self.loops)
                self.handling, self.deferred = True, self.entered % self.number != 0
                if self.source.accelerator_is_untold:
                    self.happen("untold", call, name)
                if self.source.left_out:
                    self.happen("left_out", call, name)
            elif name.startswith("no_") and name.endswith("sync") and isinstance(call, ast.Call):
                given = [*call.args, *(one.value for one in call.keywords)]
                answers = [answer for answer in (self.value(one, names) for one in given) if isinstance(answer, bool)]
                if all(answers):
                    of = words.receiver(call)
                    self.no_sync.append(
                        (words.dotted(given[0] if given and words.FRAMEWORK.search(words.last(of)) else of), call)
                    )
            if item.optional_vars is not None:
                self.give(item.optional_vars, value, names, is_literal=False)
        try:
            return self.block(node.body, names)
        finally:
            del self.no_sync[before:]

    def give(
        self, target: ast.expr, value: Value, names: ChainMap[str, Value], *, is_literal: bool, of_loop: bool = False
    ) -> None:
        """Assign a value; `None` of a loop is an unknown item."""
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, tuple) and len(value) == len(target.elts) else None
            for place, one in enumerate(target.elts):
                part = parts[place] if parts is not None else None
                if part is None and not of_loop and isinstance(value, Thing):
                    part = Thing(f"{value.name}.loss" if words.LOSS.fullmatch(words.last(one)) else words.dotted(one))
                self.give(one, part, names, is_literal=is_literal, of_loop=of_loop or part is None)
            return
        name = words.dotted(target)
        if of_loop and value is None:
            value = Thing(name)
        elif self.source.is_number(target) and (
            isinstance(value, Thing) or (type(value) in (int, float, Part) and (is_literal or value > 1))
        ):
            value = self.number
            self.counts = True
        if isinstance(target, ast.Name):
            if isinstance(value, Thing) and isinstance(names.get(name), int) and words.last(target) in self.source.counted:
                return  # a count that may be resumed begins where it begins otherwise
            names[target.id] = value
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            key = self.key(target, self.value(target.value, names))
            self.heap[key] = value
            if key.endswith(".lr"):
                self.happen("rate", target, "")
            if key.endswith("require_backward_grad_sync") and isinstance(value, bool):
                self.synchronised = value
            if key.endswith(".grad") and value is None:
                self.happen("clear", target, "")

    # expressions ---------------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: ChainMap[str, Value]) -> Value:
        """Return what an expression is."""
        self.evaluated += 1
        if self.evaluated > MOST:
            raise Ended
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id == "__name__":
                    return "__main__"
                return self.named(
                    node, node.id, names.get(node.id, self.module.get(node.id)), node.id in names or node.id in self.module
                )
            case ast.Attribute() | ast.Subscript():
                return self.attribute(node, names)
            case ast.BinOp():
                return self.combined(node.op, self.value(node.left, names), self.value(node.right, names), node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                value = self.value(node.operand, names)
                return replace(value, negated=not value.negated) if isinstance(value, Thing) else not self.truth(value)
            case ast.UnaryOp(op=ast.USub()):
                value = self.value(node.operand, names)
                return -value if isinstance(value, (int, float)) and not isinstance(value, Part) else value
            case ast.BoolOp():
                answer: Value = None
                for one in node.values:
                    answer = self.value(one, names)
                    if self.truth(answer) is isinstance(node.op, ast.Or):
                        return answer
                return answer
            case ast.IfExp():
                return self.value(node.body if self.is_true(node.test, names) else node.orelse, names)
            case ast.Compare():
                return self.compared(node, names)
            case ast.Tuple() | ast.List():
                return tuple(self.value(one, names) for one in node.elts)
            case ast.Call():
                return self.called(node, names)
            case ast.Lambda():
                return Function(node, names)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                inner = names.new_child()
                items = Items(None)
                for generator in node.generators:
                    over = self.value(generator.iter, names)
                    items = self.items(over)
                    first = items.values[0] if items.values else over if self.is_loss(over) else None
                    self.give(generator.target, first, inner, is_literal=False, of_loop=True)
                value = self.value(node.elt, inner)
                if items.values is None and self.is_loss(value):
                    return value
                return replace(items, values=items.values and (value,) * len(items.values))
            case ast.NamedExpr():
                value = self.value(node.value, names)
                self.give(node.target, value, names, is_literal=False)
                return value
            case ast.Await() | ast.Starred():
                return self.value(node.value, names)
        return Thing(words.text(node)[:80])

    def named(self, node: ast.expr, name: str, value: Value, is_known: bool) -> Value:
        """Return what a name stands for: its value, the number of micro-batches, a function, or something unknown."""
        if is_known and not (isinstance(value, Thing) and self.source.is_number(node)):
            return value
        if name in self.source.functions and not is_known:
            return Function(self.source.functions[name], self.module)
        if self.source.is_number(node):
            self.counts = True
            return self.number
        return Thing(name)

    def key(self, node: ast.Attribute | ast.Subscript, of: Value) -> str:
        """Return the dotted name under which an attribute or an item of a value is kept."""
        inner = node.attr if isinstance(node, ast.Attribute) else words.text(node.slice).strip("'\"")
        return f"{of.name if isinstance(of, Thing) else words.dotted(node.value)}.{inner}"[-120:]

    def attribute(self, node: ast.Attribute | ast.Subscript, names: ChainMap[str, Value]) -> Value:
        """Return an attribute or an item."""
        if self.called_in and (above := self.source.above(self.called_in[-1], node)) is not None:
            return Function(above, self.module, names.get("self"))
        of = self.owners[node] = self.value(node.value, names)
        if isinstance(of, tuple) and isinstance(node, ast.Subscript):
            place = self.value(node.slice, names)
            return of[place] if isinstance(place, int) and -len(of) <= place < len(of) else Thing(words.dotted(node))
        if isinstance(of, Loss):
            return of if isinstance(node, ast.Subscript) else Thing(f"loss.{node.attr}")
        key = self.key(node, of)
        if key.endswith(".sync_gradients") and self.handling:
            return not self.deferred
        if isinstance(node, ast.Attribute) and isinstance(of, Thing) and key not in self.heap:
            if of.of and (method := self.source.method(of.of, node.attr)) is not None:
                return Function(method, self.module, of)
            if not of.of and node.attr in self.source.specific:
                owner, method = self.source.specific[node.attr]
                if method not in self.called_in:
                    return Function(method, self.module, replace(of, of=owner))
        return self.named(node, key, self.heap.get(key), key in self.heap)

    def combined(self, operator: ast.operator, left: Value, right: Value, first: ast.expr, second: ast.expr) -> Value:
        """Return `left operator right`, of numbers or losses."""
        if (number := arithmetic(operator, left, right)) is not None:
            self.is_wide |= isinstance(operator, ast.Mod) and isinstance(right, Part) and right > self.number
            return number
        match operator:
            case ast.Mod() if isinstance(right, Part):
                is_first = isinstance(first, ast.BinOp) and isinstance(first.op, ast.Sub) and words.text(first.right) == "1"
                return Thing(FIRST if is_first and not self.is_of_one else PLACE)
            case ast.Div() | ast.FloorDiv() if not self.is_loss(left) and {words.batch(first), words.batch(second)} == {
                "piece",
                "whole",
            }:
                return self.number if words.batch(second) == "piece" else Part(1 / self.number)
            case ast.Div() if isinstance(left, (Loss, Thing)):
                of_window = any(map(words.WHOLE.search, words.identifiers(second)))
                if isinstance(left, Thing) and not (isinstance(right, Part) or self.is_loss(left) or of_window):
                    return Thing(left.name)
                return self.loss(left).divided(right, second)
            case ast.Mult() if isinstance(left, Loss) and isinstance(right, Loss):
                return left.multiplied(Thing("mask"), second)
            case ast.Mult() if self.is_loss(left) or self.is_loss(right):
                loss, factor, text = (left, right, second) if self.is_loss(left) else (right, left, first)
                return self.loss(loss).multiplied(factor, text)
            case ast.Add() | ast.Sub() if self.is_loss(left) or self.is_loss(right):
                return Loss.total(self.loss(value) for value in (left, right) if not isinstance(value, (int, float)))
        return Thing(words.text(first)[:40] + words.text(second)[:40])

    @staticmethod
    def is_loss(value: Value) -> bool:
        """Whether something unknown is called a loss."""
        return isinstance(value, Loss) or (isinstance(value, Thing) and "loss" in words.end(value.name))

    def loss(self, value: Value) -> Loss:
        """Return a value as a loss: `outputs.loss`, and the loss that a model returns, are means in all likelihood."""
        if isinstance(value, Loss):
            return value
        name = value.name.lower() if isinstance(value, Thing) else ""
        of_model = (name.endswith(".loss") and not name.startswith("self.")) or words.MODEL.search(words.end(name))
        return Loss.of("model" if of_model and "forward" not in name else "unknown")  # a method returns anything

    def compared(self, node: ast.Compare, names: ChainMap[str, Value]) -> Value:
        """Return the answer of a comparison."""
        left, right = self.value(node.left, names), self.value(node.comparators[0], names)
        operator = node.ops[0]
        if len(node.ops) == 1:
            if isinstance(operator, (ast.Is, ast.IsNot)) and right is None:
                if isinstance(left, Thing):
                    return replace(left, exists=True, negated=left.negated is isinstance(operator, ast.IsNot))
                return (left is None) is isinstance(operator, ast.Is)
            if isinstance(left, str) and isinstance(right, str):
                return (left == right) is isinstance(operator, (ast.Eq, ast.In))
            if isinstance(left, (int, float)) and isinstance(right, (int, float)) and type(operator) in OPERATORS:
                return bool(OPERATORS[type(operator)](left, right))
            if isinstance(left, Thing) and left.name in (PLACE, FIRST):
                is_first = left.name == FIRST or (right == 1 and not isinstance(right, Part))
                return replace(left, name=FIRST if is_first else PLACE, negated=isinstance(operator, ast.NotEq))
            opposite = {ast.NotEq: "==", ast.Lt: ">=", ast.LtE: ">", ast.NotIn: "in"}.get(type(operator))
            if opposite is not None:
                return Thing(f"{words.text(node.left)} {opposite} {words.text(node.comparators[0])}", negated=True)
        return Thing(words.text(node))

    def is_true(self, node: ast.expr, names: ChainMap[str, Value]) -> bool:
        """Whether an expression is true."""
        return self.truth(self.value(node, names))

    def truth(self, value: Value) -> bool:
        """Whether a value is true; where that is unknown, as is assumed, and a `while` goes on."""
        if not isinstance(value, Thing):
            return bool(value)
        return self.entering or self.assume(value) is not value.negated

    def is_place(self, value: Thing) -> bool:
        """Whether a test of something unknown is, by what it is called, one of the place in the window."""
        is_boundary = (
            value.counts or value.name in (PLACE, FIRST) or words.BOUNDARY.search(words.end(value.name.lower().split(" ")[0]))
        )
        return bool(self.loops and value.name not in self.assumed and is_boundary)

    def assume(self, value: Thing) -> bool:
        """Answer a test of something unknown: of the place in the window by the place in the loop, of the rest as is assumed."""
        text = value.name
        if self.is_place(value):
            self.unsure = self.counts = True
            around = [number for node, number, _ in self.loops if self.source.differentiates(node)]
            number = (around or [self.loops[-1][1]])[-1]
            if text == FIRST:
                return self.number > 1 and number % self.number == 0
            return ((number + 1) % self.number == 0) is not bool(words.WITHIN.search(text.lower()))
        if self.recording:
            self.asked[text] = None
        if value.exists and text not in self.assumed:
            return True
        if text in self.assumed or self.otherwise != "last":
            return self.assumed.get(text, self.otherwise == "yes")
        return bool(self.loops) and self.loops[-1][1] == BATCHES - 1

    # calls ---------------------------------------------------------------------------------------------------------------------

    def happen(self, kind: str, node: ast.expr | ast.stmt, name: str, **known: object) -> None:
        """Note an event; what accelerate defers does not happen (no schedule, if it was given the optimizer alone)."""
        deferred = self.deferred and kind in ("step", "clear", "schedule") and words.MODEL.search(words.end(name)) is None
        if kind == "schedule" and any(map(words.OPTIMIZER.search, self.source.prepared)):
            of = words.last(words.receiver(node)) if isinstance(node, ast.Call) else ""
            deferred &= not self.source.prepared.isdisjoint((of, words.end(name))) and not self.source.steps_schedules_itself
        of_own_period = bool(self.periods) and kind in ("average", "schedule")  # every so many micro-batches, as it was meant
        if deferred and kind == "clear":
            kind = "deferred"
        if (not deferred and not of_own_period) or kind == "deferred":
            each = [loop for loop in self.loops if words.is_of_optimizers(loop[0])]
            loops = tuple(loop for loop in self.loops if loop not in each)
            numbers = tuple(loop[1] for loop in each)
            self.events.append(Event(kind, node, name, loops=loops, each=numbers, **known))  # type: ignore[arg-type]

    def backward(self, node: ast.expr | ast.stmt, value: Value, by: str, divisor: float | None = 1.0) -> None:
        """Note that a loss is differentiated; `divisor`: what the framework divides it by, None where that is unknown."""
        loss = self.loss(value).each(lambda one: one if one.weight is None else one.divided(divisor))
        if self.no_sync:
            of, quiet = self.no_sync[-1]
            late = self.forwards.get(of) if of else None
            self.happen("quiet", late or quiet, "late" if late else "")
        self.forwards.clear()
        synchronised = self.forward_synchronised and not self.no_sync
        self.happen("backward", node, by, loss=loss, synchronised=synchronised, scaled=loss.scaled)
        for hook in self.hooks:
            self.call(hook, [], {})

    def called(self, node: ast.Call, names: ChainMap[str, Value]) -> Value:
        """Follow a call."""
        name, of = words.last(node.func), words.receiver(node)
        callee = self.value(node.func, names) if isinstance(node.func, (ast.Name, ast.Attribute, ast.Call)) else None
        owner = self.owners.pop(node.func, None)  # evaluated once: it may be a call that differentiates
        args = [self.value(one, names) for one in node.args]
        given = {one.arg: self.value(one.value, names) for one in node.keywords if one.arg}
        if words.MOVES.search(name) and "loss" not in words.text(node):
            return self.happen("average", node, name)
        if isinstance(callee, Function):
            return self.call(callee, args, given)
        if isinstance(callee, Loss):
            return callee
        if (
            name == "loss_scaler" and len(args) > 1 and not getattr(callee, "of", "")
        ):  # timm's: a backward, and the step if it is told so
            self.backward(node, replace(self.loss(args[0]), scaled=name), name)
            if self.truth(given.get("update_grad", given.get("need_update", True))):
                self.happen("step", node, getattr(args[1], "name", name), scaled=name)
            return None
        if words.JUDGE.search(name) or words.MODEL.search(name):
            self.happen("call", node, name)
        self.forwards[words.dotted(node.func)] = None if self.no_sync else node
        if words.MODEL.search(words.last(node.func)) or words.dotted(node.func) == "self":
            self.forward_synchronised = self.synchronised and not self.no_sync
        if isinstance(callee, Thing) and (forward := self.source.loss_of(callee.of)) is not None and self.depth < DEEPEST:
            return self.call(Function(forward, self.module, callee), args, given)
        label = callee.name if isinstance(callee, Thing) else words.dotted(node.func) or name
        if of is None:
            name = words.end(label) or name
        if name in ("get", "getattr") and (item := next((one for one in args if isinstance(one, str)), "")):
            owner = owner if of is not None else args[0]
            key = f"{getattr(owner, 'name', '')}.{item}"[-120:]
            return self.named(ast.Name(item), key, self.heap.get(key), key in self.heap)
        if name in FINITE:
            self.asked_finite[node] += bool(self.loops)
            if self.passed_over is None and self.asked_finite[node] - 1 == self.not_finite:
                self.passed_over, self.passed_in = node, list(self.loops)
            return FINITE[name] is not (self.passed_in == self.loops)
        if of is not None:
            answer = self.method(node, name, of, owner, args, given, names)
            if answer is not NotImplemented:
                return answer
        return self.function(node, name, label, args, given)

    def method(
        self,
        node: ast.Call,
        name: str,
        of: ast.expr,
        owner: Value,
        args: list[Value],
        given: dict[str, Value],
        names: ChainMap[str, Value],
    ) -> Value:
        """Follow a call of what a loop does to its optimizer, its gradients or its loss: to `owner`, which `of` is."""
        known = owner.name if isinstance(owner, Thing) else words.dotted(of)
        label = words.last(of) or words.end(known)
        is_scaler = any(map(words.SCALER.search, (label, words.end(known))))
        if name in ("backward", "manual_backward"):
            is_framework = name == "manual_backward" or words.FRAMEWORK.search(label) or (args and words.MODEL.search(label))
            if isinstance(owner, Loss) or not is_framework:
                self.backward(node, self.loss(owner), known)
            elif args and "accelerator" in label:
                told = self.handling or self.source.tells_accelerator
                self.backward(
                    node, args[0], known, divisor=self.number if told else 1.0 if self.source.accelerator_counts_one else None
                )
            elif args:
                divides = re.search("engine|booster", label) or words.MODEL.search(label)
                self.backward(node, args[0], known, divisor=None if divides else 1.0)
            return None
        if name == "step" and self.source.has_engine and (words.MODEL.search(label) or "engine" in label):
            self.engine_steps += 1
            mine = [event for event in self.events[self.engine_stepped :] if event.kind == "backward"]
            self.engine_stepped = len(self.events)
            if [one.name for one in mine[:2]] == [known] * 2 and "gradient_accumulation_boundary" not in self.source.text:
                self.happen("uncounted", mine[-1].node, known)
            if len(mine) == 1 and mine[0].loss and all(term.by_number < 1 for term in mine[0].loss.terms):
                self.happen("twice", mine[0].node, known)
            if len(mine) != 1 or self.engine_steps % self.number == 0:  # else it counts by itself
                self.happen("step", node, known)
            return None
        if name == "step" and is_scaler:
            self.happen("step", node, getattr(args[0], "name", known) if args else known, scaled=known)
        elif name in ("step", "optimizer_step") and self.is_optimizer(of, known):
            self.happen("step", node, known)
        elif name == "step" and (words.SCHEDULE.search(label) or words.SCHEDULE.search(words.end(known))):
            if not args and not given:
                self.happen("schedule", node, known)
        elif name == "values" and self.is_loss(owner):
            return owner
        elif name == "append" and isinstance(owner, tuple):
            self.give(of, (*owner, *args), names, is_literal=False)
        elif name == "zero_grad":
            self.happen("clear", node, known)
        elif name in ("update", "unscale_") and is_scaler:
            self.happen(name, node, known)
        elif name in ("update", "step", "update_parameters", "update_ema") and words.AVERAGE.search(label):
            if not any("loss" in text or ".item()" in text for text in (label, *map(words.text, node.args))):
                self.happen("average", node, known)
        elif (
            name == "mul_"
            and label in ("data", "p", "param")
            and any(words.text(one).startswith(("1 -", "1.0 -")) for one in node.args)
        ):
            self.happen("decay", node, known)
        elif name in ("div_", "mul_") and ".grad" in known and args and (name == "div_" or isinstance(args[0], (int, float))):
            self.happen("rescale", node, known)
        elif "post_accumulate_grad_hook" in name:
            self.hooks += [one for one in args[:1] if isinstance(one, Function)]
        elif isinstance(owner, Loss) or (self.is_loss(owner) and name in ("div", "div_", "mul", "mul_", "mean", "sum")):
            return self.reshaped(self.loss(owner), name, node, args)
        elif name in PASSED_ON and isinstance(owner, Thing) and owner.of:
            return owner
        elif name in ("mean", "sum") and isinstance(owner, Thing) and not node.args and not node.keywords:
            return Loss.of(name, masked="mask" in words.text(of))  # written out: of whatever this micro-batch holds
        else:
            return NotImplemented
        return None

    def reshaped(self, loss: Loss, name: str, node: ast.Call, args: list[Value]) -> Value:
        """Return what a method of a loss returns."""
        if name in ("div", "div_", "true_divide") and args:
            return loss.divided(args[0], node.args[0])
        if name in ("mul", "mul_") and args:
            return loss.multiplied(args[0], node.args[0])
        if name in ("sum", "mean"):
            return loss.reduced(name) if not args or name == "mean" else loss
        return loss if name in PASSED_ON else Thing(f"loss.{name}()")

    def is_optimizer(self, of: ast.expr, known: str) -> bool:
        """Whether something that steps is an optimizer: by its name, by what made it, or because it clears gradients as well."""
        if words.dotted(of) in self.source.cleared:
            return True
        texts = (words.last(of), words.end(known))
        if any(map(words.SCHEDULE.search, texts)) or any(map(words.AVERAGE.search, texts)):
            return False
        return any(map(words.OPTIMIZER.search, texts)) or "optim." in known

    def function(self, node: ast.Call, name: str, label: str, args: list[Value], given: dict[str, Value]) -> Value:
        """Return what a call returns that is no method of a loop's own: Python's, torch's losses, or something unknown."""
        first = args[0] if args else None
        match name:
            case "len":
                items = self.items(first)
                counted = items.by_number or (items.values is None and self.is_window(node))
                return self.number if counted else Length(BATCHES if items.values is None else len(items.values))
            case "range" | "trange":
                return self.range(args)
            case "enumerate" if args:
                items, start = self.items(first), given.get("start", args[1] if len(args) > 1 else 0)
                values = items.values or (None,) * BATCHES
                numbered = tuple((start + place if isinstance(start, int) else None, one) for place, one in enumerate(values))
                return replace(items, values=numbered)
            case "zip" if args:
                several = [self.items(one) for one in args]
                most = min((len(one.values) for one in several if one.values is not None), default=BATCHES)
                columns = [(None,) * most if one.values is None else one.values for one in several]
                return replace(max(several, key=lambda one: one.by_number), values=tuple(zip(*columns, strict=False)))
            case "split" | "chunk" | "tensor_split" if args and self.loops:  # else it is the data that is cut
                return Items((None,) * int(self.number), cut=True)
            case "cat" | "stack" if isinstance(first, Items) and first.values:
                return first.values[0]
            case "sum" if isinstance(first, tuple):
                losses = [one for one in first if self.is_loss(one)]
                return Loss.total(map(self.loss, losses)) if losses else Thing(words.text(node)[:80])
            case "islice" if len(args) == 2:
                return self.range(args[1:])
            case "min" | "max" if len(args) > 1:
                numbers = [one for one in args if isinstance(one, (int, float))]
                if len(numbers) == len(args):
                    found = (min if name == "min" else max)(numbers)
                    return Part(found) if any(isinstance(one, Part) for one in numbers) else found
            case "int" | "float" | "ceil" | "floor" | "bool":
                return first if isinstance(first, (int, float)) else Thing(words.text(node)[:80])
            case "tensor" | "zeros" | "new_zeros" | "zeros_like" if first == 0 or "zeros" in name:
                return 0
            case "exit" | "_exit" | "quit":
                raise Ended
            case "scale" | "scale_loss" if isinstance(first, (Loss, Thing)):
                return replace(self.loss(first), scaled=label.rpartition(".")[0] if name == "scale" else "")
        if name in THROUGH and args and not isinstance(first, (int, float)):
            return first
        if words.CLIPS.search(name):
            bounds = {one.strip("'\"") for one in map(words.text, (*node.args, *(one.value for one in node.keywords)))}
            is_off = any("clip" in one and value is False for one, value in given.items())
            if not is_off and not bounds & {"inf", "math.inf", "torch.inf", "np.inf", "float('inf')"}:
                limits = (getattr(one, "name", "") for one in (*args, *given.values()))
                scaled = next((name for name in limits if "get_scale" in name), "")
                self.happen("clip", node, "", scaled=scaled)
            return Thing("norm")
        if "grad" in name and ("div" in name or "average" in name) and any(isinstance(one, Part) for one in args):
            self.happen("divide", node, name)
        if (loss := self.of_torch(node, name, args, given)) is not None:
            return loss
        is_optimizer = "optim." in label or words.OPTIMIZER.search(name)
        which = f"@{node.lineno}_{node.col_offset}" if is_optimizer else ""  # two of a class are two optimizers
        if words.COUNTED.search(name) and words.is_number(name):
            self.counts = True
            return self.number
        for one in (*args, *given.values()):
            if isinstance(one, Function) and isinstance(one.node, ast.FunctionDef) and one.node not in self.running:
                self.hand(node, one)
        counts = any(isinstance(one, Part) for one in (*args, *given.values()))
        if words.MODEL.search(words.last(node.func)) and not words.MODEL.search(name):
            label = words.dotted(node.func)  # a model by the name that it has here
        made = Thing(f"{label}{which}()", label if label in self.source.classes else "", counts=counts, at=node)
        if made.of and (method := self.source.method(made.of, "__init__")) is not None:
            self.call(Function(method, self.module, made), args, given)
        elif made.of:  # a dataclass
            fields = (one.target for one in self.source.classes[made.of].body if isinstance(one, ast.AnnAssign))
            for name, value in [*zip(map(words.dotted, fields), args, strict=False), *given.items()]:
                self.heap[f"{made.name}.{name}"] = value
        return made

    def hand(self, node: ast.AST, function: Function) -> None:
        """Follow a function that is handed to a framework: for each micro-batch, if it does a backward."""
        before = len(self.events)
        self.running.add(function.node)
        for number in range(BATCHES):
            self.loops.append((node, number, False))
            self.call(function, [], {}, is_root=True)
            self.loops.pop()
            if not any(event.kind == "backward" for event in self.events[before:]):
                del self.events[before:]
                break
        self.running.discard(function.node)

    def of_torch(self, node: ast.Call, name: str, args: list[Value], given: dict[str, Value]) -> Loss | None:
        """Return the loss that a call of torch, or of what is called a criterion, computes."""
        told = [one for one in (given.get("reduction"), *args) if isinstance(one, str) and one in ("mean", "sum", "none")]
        if name not in words.LOSSES | words.LOSS_MODULES and not (
            words.CRITERION.search(name) and name not in self.source.functions
        ):
            if "loss" in name and any(isinstance(one, Part) for one in args):
                return Loss.of("unknown", weight=None)
            return Loss.of(told[0]) if told and told[0] != "none" and "loss" in name else None
        kind = {"sum": "sum", "none": "rows"}.get(told[0] if told else "mean", "mean")
        if any(isinstance(one, Part) for one in args):
            return Loss.of("unknown", weight=None)
        takes_more = len(args) > 2 and name not in words.LOSSES  # a criterion takes outputs and targets
        if takes_more or ("reduction" in given and not told):
            kind = "unknown"
        ignores = "ignore_index" in given and (given["ignore_index"] != -1 or self.source.counts_labels)  # -1 may ignore nothing
        return Loss.of(kind, padded=kind == "mean" and ignores)

    def items(self, value: Value) -> Items:
        """Return what a loop over a value goes over."""
        match value:
            case Items():
                return value
            case tuple():
                return Items(value)
            case Part():
                return Items((None,) * int(value), by_number=True)
            case Thing() if words.OPTIMIZER.search(words.end(value.name)) and value.name.endswith("s"):
                return Items(tuple(Thing(f"{value.name}[{place}]") for place in range(2)))
        return Items(None)

    @staticmethod
    def is_window(node: ast.expr) -> bool:
        """Whether something is the micro-batches of a window, by what it is called."""
        return any(map(words.STRICT.search, words.identifiers(node)))

    def range(self, args: list[Value]) -> Items:
        """Return `range(...)`; as many as there are batches where its end is unknown."""
        start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
        stop = args[1] if len(args) > 1 else args[0] if args else None
        by_number = any(isinstance(one, Part) for one in (stop, step))
        if isinstance(step, Thing) and start == 0:
            return Items((None,) * int(self.number), cut=True)
        if not isinstance(start, (int, float)) or not isinstance(step, (int, float)) or not step:
            return Items((None,) * BATCHES)
        if not isinstance(stop, (int, float)):
            return Items(
                tuple(int(start) + int(step) * place for place in range(int(self.number) if by_number else BATCHES)), by_number
            )
        return Items(tuple(range(int(start), int(stop), int(step) or 1)[:LONGEST]), by_number)

    def call(self, function: Function, args: list[Value], given: dict[str, Value], *, is_root: bool = False) -> Value:
        """Follow a function of the file, and return what it returns."""
        node = function.node
        self.visited.add(node)
        if self.depth > DEEPEST:
            return Thing(getattr(node, "name", ""))
        names = function.sees.new_child()
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        if function.instance is not None and parameters:
            names[parameters.pop(0)] = function.instance
        defaults = dict(zip(reversed(parameters), reversed(node.args.defaults), strict=False))
        defaults |= {
            one.arg: value for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value is not None
        }
        bound = dict(zip(parameters, args, strict=False)) | given
        for name in (*parameters, *(one.arg for one in node.args.kwonlyargs)):
            value = bound.get(name, Thing(name))
            if name not in bound and name in defaults:
                default = self.value(defaults[name], function.sees)
                value = default if not is_root or default == 0 else value
            elif isinstance(value, Thing) and START.search(name) and words.text(defaults.get(name, node.args)) == "0":
                value = 0  # what may be resumed
            as_name = ast.Name(name)
            is_number = self.source.is_number(as_name) and isinstance(value, (Thing, int)) and value is not False
            self.counts |= is_number
            names[name] = self.number if is_number else value
        if isinstance(node, ast.Lambda):
            return self.value(node.body, names)
        self.depth += 1
        self.called_in.append(node)
        try:
            self.block(node.body, names)
        except Left as left:
            return left.value
        finally:
            self.called_in.pop()
            self.depth -= 1
        return None


def runs(source: Source) -> Iterator[list[Run]]:
    """Yield, of each function that nothing followed so far calls, the ways through it.

    Args:
        source: A module.

    Yields:
        The ways through one function.
    """
    visited: set[ast.AST] = set()
    for root in source.roots:
        if root in visited:
            continue
        found = [_followed(source, root, {}, otherwise) for otherwise in ("yes", "no", "last")]
        accumulates = any(run.counts for run in found)
        if accumulates:
            found.append(_followed(source, root, {}, "yes", number=Part(1)))
        for one in list({**found[0].asked, **found[1].asked})[: 4 if accumulates else 0]:
            found += [_followed(source, root, {one: False}, "yes"), _followed(source, root, {one: True}, "no")]
        if accumulates and any(name in source.text for name in FINITE):
            found.append(_followed(source, root, {}, "no", not_finite=1))
        for run in found:
            visited |= run.visited
        yield found


def _followed(
    source: Source, root: Root, assumed: dict[str, bool], otherwise: str, not_finite: int | None = None, number: Part = N
) -> Run:
    run = Run(source, assumed, otherwise, not_finite, number)
    for node in source.tree.body if not isinstance(root, ast.Module) else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            try:
                run.statement(node, run.module)
            except (Ended, Left):
                continue
    run.events.clear()
    run.follow(root)
    return run


def _steps(loop: ast.AST) -> bool:
    """Whether a loop takes optimizer steps: what it goes over are then no pieces of one batch."""
    return any(words.last(call.func) == "step" for call in words.inside(loop, ast.Call))
