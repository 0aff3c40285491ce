"""One file: its text, its syntax tree, what calls what in it, and the lines on which its author wants no word."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.system.files import read_file

PYTHON = (".py", ".pyi", ".pyw", "")
COMMENT = re.compile(r"#\s*accumulation-lint:\s*ignore\s*(?:\[([^\]]*)\])?")
CLEARS = re.compile(r"\.grad\b|(zero|clear|reset|delete)_?(the_)?grad|deepspeed|set_to_none|dist_autograd")
MAGIC = re.compile(r"\s*([%!?]|\w[\w.]*\s*\?|[\w, ]+=\s*[!%])")  # lines of a notebook that are no Python
COUNTED = re.compile(r"(int\()?[\w.\[\]'\"]*mask\w*['\"\]]*\.sum\(\)(\.item\(\))?\)?")  # a count of labels that is kept
Definition = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Root = ast.Module | Definition
LOOPS = (ast.For, ast.AsyncFor, ast.While)
TOUCHING = {
    "backward", "manual_backward", "step", "optimizer_step", "zero_grad", "accumulate", "no_sync", "unscale_", "div_",
    "loss_scaler",
}  # fmt: skip
EVENTS = {"update", "scale", "append", "update_parameters", "update_ema", "mul_"}
COMMON = {"state_dict", "load_state_dict", "zero_grad", "train_step", "training_step"}  # of models as well as of trainers
WORTH_READING = ("backward", "scaler.step(", "loss_scaler(", "compute_loss", "PreTrainedModel", "LightningModule")


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def _remembered(method: Callable[[Source, Asked], Answer]) -> Callable[[Source, Asked], Answer]:
    """Return a method of a file that looks once at each node that it is asked about."""

    @wraps(method)
    def answer(source: Source, about: Asked) -> Answer:
        known: dict[tuple[object, Asked], Answer] = source.known
        if (method, about) not in known:
            known[method, about] = method(source, about)
        return known[method, about]

    return answer


class Source:
    """The text of a module or a notebook, which is parsed when it is first asked about."""

    def __init__(self, text: str, cells: list[tuple[int, int]] | None = None, *, is_test: bool = False) -> None:
        self.text, self.is_test = text, is_test
        self.known: dict[Any, Any] = {}
        self.cells = cells or []  # of a notebook: number and first line of each cell of code

    @cached_property
    def tree(self) -> ast.Module:
        """The text as a tree. Raises SyntaxError or ValueError where it is no Python."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
            return ast.parse(self.text)

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file in the encoding that it declares. Raises OSError, SyntaxError or ValueError."""
        content = read_file(path)
        if path.suffix == ".ipynb":
            return cls(*_code(json.loads(content)))
        if path.suffix not in PYTHON:
            raise ValueError(f"one that is called {path.suffix}")
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        is_test = path.stem.startswith("test_") or path.stem.endswith("_test")
        return cls(io.TextIOWrapper(io.BytesIO(content), encoding).read(), is_test=is_test)

    @property
    def is_worth_reading(self) -> bool:
        """Whether the text names anything that a rule is about."""
        return any(word in self.text for word in WORTH_READING)

    def place(self, line: int) -> str:
        """Return a line as people count it: in a notebook by cell and line."""
        number, first = max((cell for cell in self.cells if cell[1] <= line), key=lambda cell: cell[1], default=(0, 1))
        return f"cell {number}:{line - first + 1}" if self.cells else str(line)

    # what is where -------------------------------------------------------------------------------------------------------------

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the file."""
        return list(ast.walk(self.tree))

    def every(self, kinds: type[words.Node] | tuple[type[words.Node], ...]) -> Iterator[words.Node]:
        """Yield the nodes of the file that are of these kinds."""
        return (one for one in self.nodes if isinstance(one, kinds))

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by their names."""
        return {node.name: node for node in self.every(ast.ClassDef)}

    @cached_property
    def functions(self) -> dict[str, Definition]:
        """The functions of the module's own body."""
        return {node.name: node for node in self.tree.body if isinstance(node, Definition)}

    @cached_property
    def _classes_of(self) -> dict[ast.AST, ast.ClassDef]:
        return {one: node for node in self.classes.values() for one in node.body if isinstance(one, Definition)}

    def class_of(self, method: ast.AST) -> ast.ClassDef | None:
        """Return the class of a method."""
        return self._classes_of.get(method)

    def family(self, name: str) -> Iterator[ast.ClassDef]:
        """Yield a class and those of its bases that are in the file."""
        waiting, seen = [name], set()
        while waiting:
            node = self.classes.get(waiting.pop())
            if node is not None and node.name not in seen:
                seen.add(node.name)
                yield node
                waiting += map(words.dotted, node.bases)

    def method(self, of: str, name: str) -> Definition | None:
        """Return a method of a class, or of its bases in the file."""
        methods = (one for node in self.family(of) for one in node.body if isinstance(one, Definition))
        return next((one for one in methods if one.name == name), None)

    def derived(self, name: str) -> str:
        """Return the one class of the file that descends from a class, or the class itself."""
        below = [other for other in self.classes if other != name and any(one.name == name for one in self.family(other))]
        return below[0] if len(below) == 1 else name

    def above(self, method: ast.AST, node: ast.AST) -> Definition | None:
        """Return what `super().f` is in a method."""
        of = self.class_of(method)
        if of is None or not isinstance(node, ast.Attribute) or not _is_super(node):
            return None
        bases = (self.method(words.dotted(base), node.attr) for base in of.bases)
        return next((one for one in bases if one is not None), None)

    @_remembered
    def loss_of(self, name: str) -> Definition | None:
        """Return the forward of a class, if it computes a loss."""
        forward = self.method(name, "forward") if name else None
        has_loss = forward is not None and any("loss" in one or one in words.LOSSES for one in words.identifiers(forward))
        return forward if has_loss else None

    @cached_property
    def _all(self) -> list[Definition]:
        return list(self.every(DEFINITIONS))

    def function_at(self, line: int) -> Definition | None:
        """Return the innermost function around a line."""
        around = (node for node in self._all if node.lineno <= line <= (node.end_lineno or 0))
        return max(around, key=lambda node: node.lineno, default=None)

    def _reaching(self, wanted: set[str]) -> set[str]:
        """Return the names of functions that call one of these, or call one that does."""
        called = {node: set(map(self._callee, words.inside(node, ast.Call))) | _handed_on(node) for node in self._all}
        wanted = wanted | {f".{name}" for name in wanted}
        reaching: set[str] = set()
        while found := {node.name.lower() for node in self._all if called[node] & (wanted | reaching)} - reaching:
            reaching |= found
        return reaching

    @cached_property
    def _to_backward(self) -> set[str]:
        differentiating = {"backward", "manual_backward", "loss_scaler"}
        return self._reaching(differentiating) | differentiating | {f".{name}" for name in differentiating}

    @cached_property
    def _touching(self) -> set[str]:
        clips = {name for name in (words.last(call.func) for call in self.every(ast.Call)) if words.CLIPS.search(name)}
        return self._reaching(TOUCHING | clips) | TOUCHING | clips

    @cached_property
    def roots(self) -> list[Root]:
        """Where to begin: the module, functions that nothing here calls, and then the others that lead to a backward."""
        own = [node for node in self.tree.body if not isinstance(node, (*DEFINITIONS, ast.ClassDef))]
        module = any(self._leads(call) for node in own for call in words.inside(node, ast.Call))
        outer = [node for node in (*self.functions.values(), *self._classes_of) if isinstance(node, Definition)]
        leading = [node for node in outer if node.name.lower() in self._to_backward or self.is_automatic(node)]
        called = {words.last(call.func) for call in self.every(ast.Call)}
        leading.sort(key=lambda node: node.name.lower() in called)
        leading += [node for node in outer if node not in leading and self.unscales_nothing and self._steps_by_scaler(node)]
        return [*([self.tree] if module else []), *(node for node in leading if node.name not in ("backward", "__init__"))]

    @cached_property
    def unscales_nothing(self) -> bool:
        """Whether nothing in the file takes a loss scale out of the gradients."""
        return "unscale" not in self.text

    @staticmethod
    def _steps_by_scaler(node: ast.AST) -> bool:
        calls = [call for call in words.inside(node, ast.Call) if words.last(call.func) == "step"]
        return any(words.SCALER.search(words.last(words.receiver(call))) for call in calls)

    @_remembered
    def loops_over_backward(self, node: ast.AST) -> bool:
        """Whether a loop is inside, here or in what it calls, that has a backward in it."""
        return self._has_loop(node, frozenset())

    def _has_loop(self, node: ast.AST, seen: frozenset[str]) -> bool:
        for one in ast.walk(node):
            is_loop = isinstance(one, LOOPS) and one is not node and not words.is_of_optimizers(one)
            if is_loop and any(self._leads(call) for call in words.inside(one, ast.Call)):
                return True
            if isinstance(one, ast.Call) and self._leads(one) and (name := self._callee(one)) not in seen:
                callees = [other for other in self._all if other.name.lower() == name]
                if any(self._has_loop(other, seen | {name}) for other in callees):
                    return True
        return False

    @_remembered
    def differentiates(self, loop: ast.AST) -> bool:
        """Whether a backward is inside a loop, or it is no loop of the text: what is called for each micro-batch."""
        return not isinstance(loop, LOOPS) or any(map(self._leads, words.inside(loop, ast.Call)))

    def _leads(self, call: ast.Call) -> bool:
        return self._callee(call) in self._to_backward

    def _callee(self, call: ast.Call) -> str:
        """Return the name of a function, or of a method of `self`, or of another object if one class alone has such a method."""
        name = words.last(call.func)
        is_own = isinstance(call.func, ast.Name) or words.dotted(words.receiver(call)) in ("self", "cls") or _is_super(call.func)
        return name if is_own or name in self.specific else f".{name}"

    @cached_property
    def specific(self) -> dict[str, tuple[str, Definition]]:
        """The methods that one class of the file alone has, of names of several words; by name, with the class."""
        found: dict[str, list[tuple[str, Definition]]] = {}
        for method, of in self._classes_of.items():
            assert isinstance(method, Definition)
            found.setdefault(method.name, []).append((of.name, method))
        common = TOUCHING | EVENTS | COMMON
        return {name: own[0] for name, own in found.items() if len(own) == 1 and "_" in name.strip("_") and name not in common}

    @_remembered
    def matters(self, node: ast.If) -> bool:
        """Whether it depends on a test what is done to gradients or losses."""
        return any(map(self._decides, ast.walk(node)))

    @_remembered
    def ends_window(self, node: ast.If) -> bool:
        """Whether a test without N is one of a window's end: its block steps, differentiates nothing, and sets a counter back."""
        if any(map(self.is_number, ast.walk(node.test))):
            return False
        inside = [one for statement in node.body for one in ast.walk(statement)]
        calls = [one for one in inside if isinstance(one, ast.Call)]
        steps = any(words.last(call.func) == "step" for call in calls) and not any(map(self._leads, calls))
        return steps and any(isinstance(one, ast.Assign) and words.text(one.value) in ("0", "[]", "0.0") for one in inside)

    @_remembered
    def stays(self, node: ast.If) -> bool | None:
        """Return the answer to a test with which its block goes on; None where both answers, or none, leave it."""
        taken, passed = self._leaves(node.body), bool(node.orelse) and self._leaves(node.orelse)
        return None if taken is passed else passed

    def _leaves(self, block: list[ast.stmt]) -> bool:
        """Whether a block raises, exits, or passes over what follows it, without a backward or a step of its own."""
        end = block[-1]
        if isinstance(end, ast.If) and end.orelse:
            return self._leaves(end.body) and self._leaves(end.orelse)
        call = end.value if isinstance(end, ast.Expr) else None
        leaves = isinstance(end, (ast.Raise, ast.Continue, ast.Break)) or (
            isinstance(call, ast.Call) and words.last(call.func) in ("exit", "_exit", "quit")
        )
        if isinstance(end, ast.Return):
            leaves = end.value is None or self._function_of.get(end, "") in self._to_backward
        return leaves and not any(
            self._leads(one) or words.last(one.func) == "step" for part in block for one in words.inside(part, ast.Call)
        )

    @cached_property
    def _function_of(self) -> dict[ast.AST, str]:
        """The name of the innermost function around each `return`."""
        return {one: node.name.lower() for node in self._all for one in words.inside(node, ast.Return)}

    @_remembered
    def is_plain(self, loop: ast.AST) -> bool:
        """Whether a loop does nothing to gradients, sums no losses and gathers no window: one round of it says as much as all."""
        gathers = any(map(self.is_number, ast.walk(getattr(loop, "iter", loop)))) if isinstance(loop, ast.For) else False
        return not gathers and not any(
            (isinstance(one, ast.Call) and words.last(one.func) in self._touching)
            or (isinstance(one, (ast.Call, ast.AugAssign)) and "loss" in words.text(getattr(one, "target", one)).lower())
            or isinstance(one, ast.Break)
            for one in ast.walk(loop)
        )

    def _decides(self, node: ast.AST) -> bool:
        match node:
            case ast.Call():
                return words.last(node.func) in self._touching
            case ast.Name(id=name, ctx=ast.Store()):
                return "loss" in name or name in self._divisors
        return isinstance(node, (ast.Continue, ast.Break, ast.Return))

    @cached_property
    def _divisors(self) -> set[str]:
        divisors = [node.right for node in self.every(ast.BinOp) if isinstance(node.op, ast.Div)]
        divisors += [node.value for node in self.every(ast.AugAssign) if isinstance(node.op, ast.Div)]
        return {name for node in divisors for name in words.names(node)}

    @cached_property
    def made(self) -> dict[str, list[ast.Call]]:
        """The calls whose result is given to a name (`criterion`, `self.criterion`), by its last identifier."""
        found: dict[str, list[ast.Call]] = {}
        for node in self.every(ast.Assign):
            if isinstance(node.value, ast.Call):
                for target in node.targets:
                    found.setdefault(words.last(target), []).append(node.value)
        return found

    # what names stand for ------------------------------------------------------------------------------------------------------

    def is_number(self, node: ast.AST) -> bool:
        """Whether a name stands for the number of micro-batches: by what it usually means, or by the test of a step."""
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            return False
        name = _key(node) if isinstance(node, ast.Subscript) else words.last(node)
        return name in self._numbers or (words.is_number(name) and name not in self._counters)

    @cached_property
    def _numbers(self) -> set[str]:
        return self._moduli - self._counters

    @cached_property
    def _counters(self) -> set[str]:
        """Names that are added to, set back to 0, or gone through by a loop."""
        found = set()
        for node in self.nodes:
            match node:
                case ast.AugAssign(target=target, op=ast.Add()):
                    found.add(words.last(target))
                case ast.Assign(targets=targets, value=ast.Constant(value=0)):
                    found |= {words.last(target) for target in targets}
                case ast.For(target=target) | ast.AsyncFor(target=target):
                    found |= {name.lower() for name in words.names(target)}
        return found

    @cached_property
    def counted(self) -> set[str]:
        """Names that a number is added to."""
        return {words.last(node.target) for node in self.every(ast.AugAssign) if isinstance(node.value, ast.Constant)}

    @cached_property
    def _moduli(self) -> set[str]:
        """Names `n` of `(i + 1) % n == 0` in a test of a step of an optimizer, or in what such a test was given."""
        tests = [
            node.test
            for node in self.every(ast.If)
            if any(words.last(call.func) in ("step", "zero_grad") for call in words.inside(node, ast.Call))
        ]
        asked = {name for test in tests for name in words.identifiers(test)}
        for node in self.every(ast.Assign):
            if any(words.last(target) in asked for target in node.targets):
                tests.append(node.value)
        operands = [one.right for test in tests for one in words.inside(test, ast.BinOp) if isinstance(one.op, ast.Mod)]
        return {words.last(one) for one in operands} - {""}

    @cached_property
    def cleared(self) -> set[str]:
        """What `zero_grad` is called of."""
        return {words.dotted(words.receiver(call)) for call in self.every(ast.Call) if words.last(call.func) == "zero_grad"} - {
            ""
        }

    @cached_property
    def prepared(self) -> set[str]:
        """What a call is given and gives back, by last identifiers: `model, optimizer = prepare(model, optimizer)`."""
        found = set()
        for node in self.every(ast.Assign):
            if isinstance(node.value, ast.Call):
                targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
                found |= set(map(words.last, targets)) & set(map(words.last, node.value.args))
        return found - {""}

    @cached_property
    def left_out(self) -> bool:
        """Whether models are prepared and trained that no `accumulate` of the file is given."""
        calls: dict[str, list[ast.Call]] = {}
        for call in self.every(ast.Call):
            calls.setdefault(words.last(call.func), []).append(call)
        given, prepared = ([one for call in calls.get(name, ()) for one in call.args] for name in ("accumulate", "prepare"))
        models = {words.last(words.receiver(call)) for call in calls.get("train", ())} & set(map(words.last, prepared))
        named = models & set(map(words.last, given))
        return not any(isinstance(one, ast.Starred) for one in given) and bool(named and models - named)

    @cached_property
    def clears(self) -> bool:
        """Whether the file names a gradient, or what clears it, anywhere; DeepSpeed's engine clears by itself."""
        return CLEARS.search(self.text) is not None

    @cached_property
    def makes_optimizers(self) -> bool:
        """Whether the file makes an optimizer of torch's."""
        return any(words.dotted(call.func).startswith(("torch.optim.", "optim.")) for call in self.every(ast.Call))

    @cached_property
    def _told(self) -> list[list[ast.keyword]]:
        """What each `Accelerator(...)` of the file is given."""
        return [call.keywords for call in self.every(ast.Call) if words.last(call.func) == "accelerator"]

    @cached_property
    def tells_accelerator(self) -> bool:
        """Whether the file tells accelerate the number of micro-batches."""
        given = [one for keywords in self._told for one in keywords if one.arg and words.NUMBER.search(one.arg)]
        return any(not isinstance(one.value, ast.Constant) or one.value.value != 1 for one in given)

    @cached_property
    def steps_schedules_itself(self) -> bool:
        """Whether accelerate is told that it shall not step schedules with the optimizer."""
        given = (one for keywords in self._told for one in keywords if one.arg == "step_scheduler_with_optimizer")
        return any(isinstance(one.value, ast.Constant) and one.value.value is False for one in given)

    @cached_property
    def accelerator_counts_one(self) -> bool:
        """Whether the file makes its Accelerator and says nothing of a number of micro-batches."""
        given = {one.arg or "**" for keywords in self._told for one in keywords}
        return bool(self._told) and not any("**" in one or "accum" in one or "plugin" in one for one in given)

    @cached_property
    def accelerator_is_untold(self) -> bool:
        """Whether the file makes its Accelerator without the number of micro-batches, and has that number as a setting."""
        set_by = (one for one in self.every(ast.Attribute) if one.attr == "gradient_accumulation_steps")
        is_set = any(re.search("accelerator|plugin", words.last(one.value)) is None for one in set_by)
        return is_set and self.accelerator_counts_one and "Plugin(" not in self.text

    @cached_property
    def writes_rates(self) -> list[tuple[ast.expr, ast.expr]]:
        """Where the file sets learning rates, `group["lr"] = rate`, and what to."""
        found = [(target, node.value) for node in self.every(ast.Assign) for target in node.targets]
        return [(target, value) for target, value in found if isinstance(target, ast.Subscript) and _key(target) == "lr"]

    @property
    def has_engine(self) -> bool:
        """Whether the file makes an engine of DeepSpeed's, which divides and defers by itself."""
        return "deepspeed.initialize" in self.text

    @property
    def speaks_of_lightning(self) -> bool:
        """Whether the file names the setting by which Lightning accumulates."""
        return "accumulate_grad_batches" in self.text

    def is_automatic(self, node: ast.AST) -> bool:
        """Whether it is a `training_step` after which Lightning does the backward."""
        of = self.class_of(node)
        if of is None or node.name != "training_step":  # type: ignore[attr-defined]
            return False
        bases = {words.last(base) for one in self.family(of.name) for base in one.bases}
        return "lightningmodule" in bases and "manual_backward" not in self.text and "automatic_optimization" not in self.text

    @cached_property
    def counts_labels(self) -> bool:
        """Whether the file counts the valid labels of a micro-batch: `(labels != -100).sum()`, `n = mask.sum()`."""
        sums = [words.receiver(call) for call in self.every(ast.Call) if words.last(call.func) == "sum"]
        kept = [one for given in self._values.values() for one in given] + [node.value for node in self.every(ast.AugAssign)]
        of_masks = any(COUNTED.fullmatch(words.text(one)) for one in kept)
        return of_masks or any(isinstance(one, ast.Compare) and "==" not in words.text(one) for one in sums)

    def returned(self, name: str) -> list[ast.expr]:
        """Return what a function of the module returns, outside of the functions in it first."""
        node = self.functions.get(name)
        return [one.value for one in words.inside(node, ast.Return) if one.value is not None] if node is not None else []

    def given(self, node: ast.expr) -> list[ast.expr]:
        """Return what a name is given: by assignments, or as a parameter by the calls of its function."""
        values = self._values.get(words.text(node), [])
        found = [one for one in values if one.lineno < node.lineno] or list(values)
        if isinstance(node, ast.Name) and not found:
            for call in self.every(ast.Call):
                function = self.functions.get(words.dotted(call.func))
                names = [one.arg for one in function.args.args] if function is not None else []
                found += [one for name, one in zip(names, call.args, strict=False) if name == node.id]
                found += [one.value for one in call.keywords if one.arg == node.id and function is not None]
        return found

    @cached_property
    def _values(self) -> dict[str, list[ast.expr]]:
        """What each target is given, by its text."""
        found: dict[str, list[ast.expr]] = {}
        for node in self.every(ast.Assign):
            for target in node.targets:
                found.setdefault(words.text(target), []).append(node.value)
        for more in self.every(ast.AugAssign):
            whole = ast.copy_location(ast.BinOp(more.target, more.op, more.value), more)
            found.setdefault(words.text(more.target), []).append(whole)
        return found

    @cached_property
    def _gradients(self) -> list[tuple[ast.AST, ast.AST | None]]:
        """What is done to each `.grad`: the longest expression that begins with it, and what that stands in."""
        parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        found = []
        for node in self.every(ast.Attribute):
            if node.attr == "grad":
                whole: ast.AST = node
                while isinstance(parents.get(whole), (ast.Attribute, ast.Subscript)):
                    whole = parents[whole]
                found.append((whole, parents.get(whole)))
        return found

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether the file may put gradients elsewhere before it clears them."""
        for node, above in self._gradients:
            looked_at = isinstance(above, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If)) or words.LOOKS.search(
                words.text(above or node)
            )
            cleared = isinstance(above, ast.Assign) and isinstance(above.value, ast.Constant)
            if not looked_at and not cleared:
                return True
        return "opacus" in self.text

    @cached_property
    def weighs_gradients(self) -> bool:
        """Whether the file writes to `.grad` or may divide gradients by a call, or sums them over ranks by itself."""
        for node, above in self._gradients:
            changed = isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.startswith("zero")
            is_target = isinstance(above, ast.Assign) and node in above.targets and not isinstance(above.value, ast.Constant)
            if changed or is_target or isinstance(above, (ast.AugAssign, ast.BinOp)):
                return True
        for called in (words.last(node.func) for node in self.every(ast.Call)):
            name = re.sub("accumulat|scaler$", "", called) if called.strip("_") != "grad_scaler" else called  # that one is called
            if "grad" in name and not words.CLIPS.search(name) and re.search("div|scale|mul|average|normali|reduce|sync_g", name):
                return True
        return "opacus" in self.text or "horovod" in self.text  # they average by themselves

    # comments ------------------------------------------------------------------------------------------------------------------

    def silenced(self, hit: Hit) -> bool:
        """Whether a comment `# accumulation-lint: ignore`, or `ignore[CAUSE, CAUSE]`, stands on a line of the hit."""
        return any(not causes or hit.cause in causes for line, causes in self._ignored if hit.line <= line <= hit.last_line)

    @cached_property
    def _ignored(self) -> list[tuple[int, frozenset[str]]]:
        found = []
        if "accumulation-lint" in self.text:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and (match := COMMENT.search(token.string)):
                    causes = frozenset(filter(None, re.split(r"[\s,]+", match[1] or "")))
                    found.append((token.start[0], causes))
        return found


def _is_super(node: ast.expr) -> bool:
    of = getattr(node, "value", None)
    return isinstance(of, ast.Call) and words.last(of.func) == "super"


def _key(node: ast.Subscript) -> str:
    return str(node.slice.value).lower() if isinstance(node.slice, ast.Constant) else ""


def _handed_on(node: ast.AST) -> set[str]:
    """Return what a function hands to others without calling it: hooks, closures."""
    return {words.last(one) for call in words.inside(node, ast.Call) for one in call.args if isinstance(one, ast.Name)}


def _code(notebook: object) -> tuple[str, list[tuple[int, int]]]:
    """Return the code of a notebook as one text, and where its cells begin. Raises ValueError for other JSON."""
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("expected a notebook with cells")
    lines: list[str] = []
    cells = []
    for number, cell in enumerate(notebook["cells"], start=1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            text = cell.get("source", "")
            own = ("".join(text) if isinstance(text, list) else str(text)).splitlines()
            cells.append((number, len(lines) + 1))
            is_magic = bool(own) and own[0].startswith("%%")
            lines += [
                "" if is_magic else "pass".rjust(len(one) - len(one.lstrip()) + 4) if MAGIC.match(one) else one for one in own
            ]
    return "\n".join(lines) + "\n", cells
