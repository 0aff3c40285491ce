"""The loops of `tests/audit/loops` as one text each: stages handed to `frame.train` are put where it would call them."""

import ast
import copy
import inspect
from collections.abc import Mapping

LOOP = """
for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, WINDOWS):
    before_backward
    part = LOSS
    part.backward()
    after_backward
    if last:
        before_step
        step
        after_step
        clear
    after_micro_batch
"""
STAGES = ("before_backward", "after_backward", "before_step", "step", "after_step", "clear", "after_micro_batch")
LOSSES = {  # of `frame`
    "mean_over_window": "ce(model(X[ids]), Y[ids], reduction='sum') / len(window)",
    "own_mean": "ce(model(X[ids]), Y[ids])",
    "token_mean_over_window": "data.token_loss(model(TOKENS[ids]), TOKENS[ids]) / data.num_targets(TOKENS[window])",
    "own_token_mean": "data.token_loss(model(TOKENS[ids]), TOKENS[ids], 'mean')",
}
Names = Mapping[str, ast.expr | ast.FunctionDef]


def functions(module):
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


class _Run(ast.NodeTransformer):
    """A loop over `frame.At`, in the names of one that is written out."""

    def visit_Attribute(self, node):
        self.generic_visit(node)
        return ast.Name(OF_A_RUN[node.attr]) if ast.unparse(node.value) == "at" and node.attr in OF_A_RUN else node

    def visit_Name(self, node):
        is_read = node.id == "parts" and isinstance(node.ctx, ast.Load)
        return ast.parse("window.split(batch_size)", mode="eval").body if is_read else node

    def visit_Expr(self, node):
        return list(STEP) if ast.unparse(node) == "at.step()" else self.generic_visit(node)

    def visit_For(self, node):
        given = ast.unparse(node.iter)
        self.generic_visit(node)
        if given.startswith("at.windows("):
            made = ast.parse(f"for window in {given[11:-1] or 'data.windows'}(batch_size * accumulation_steps): pass").body[0]
            assert isinstance(made, ast.For)
            made.body = [*node.body, *STEP]
            return made
        return node


OF_A_RUN = {"n": "accumulation_steps", "size": "batch_size", "model": "model", "optimizer": "optimizer"}
STEP = ast.parse("optimizer.step()\noptimizer.zero_grad()").body


def _exchanged(node):
    """What is exchanged of `frame.train`, as its arguments."""
    match node:
        case ast.Dict():
            return [ast.keyword(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        case ast.BinOp():
            return _exchanged(node.left) + _exchanged(node.right)
    return [ast.keyword(None, node)]


def written_out(function):
    """Return the source of a loop, with `ce` as what it is and with the body of `frame.train` in place of a call of it."""
    if ast.unparse(function.args) == "at":
        run = _Run().visit(copy.deepcopy(function))
        (made_with,) = run.decorator_list
        given = {one.arg: ast.unparse(one.value) for one in made_with.keywords}
        made = f"model = data.model()\noptimizer = {given.get('optimizer', 'torch.optim.SGD')}(model.parameters())"
        last = run.body[-1]
        if isinstance(last, ast.Return) and last.value is not None:
            call = ast.Call(ast.Name("train"), [ast.Name("_"), ast.Name("_"), ast.Name("model")], _exchanged(last.value))
            run.body[-1] = ast.Expr(call)
        sizes = ast.parse("def f(batch_size, accumulation_steps): pass").body[0].args  # type: ignore[attr-defined]
        function = ast.FunctionDef(function.name, sizes, [*ast.parse(made).body, *run.body], [], None)
    body: list[ast.stmt] = []
    for statement in function.body:
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("train", "frame.train"):
            body += _loop(call, _names(function))
        else:
            body.append(statement)
    text = ast.unparse(ast.fix_missing_locations(ast.FunctionDef(function.name, function.args, body, [], None)))
    return text.replace("ce(", "cross_entropy(").replace("reducross_entropy(", "reduce(")


def _names(function):
    """What the local names of a loop stand for."""
    given = [one for one in function.body if isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is not None]
    pairs = [(one.targets[0] if isinstance(one, ast.Assign) else one.target, one.value) for one in given]
    names: dict[str, ast.expr | ast.FunctionDef] = {ast.unparse(target): value for target, value in pairs if value is not None}
    return names | {one.name: one for one in function.body if isinstance(one, ast.FunctionDef)}


def _loop(call, names):
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given |= dict(zip(("_", "_", "model", "loss", "optimizer"), call.args, strict=False))
    optimizer = "optimizer" if "optimizer" in names else "stepped_optimizer"
    made = ast.unparse(given.get("optimizer", ast.parse("torch.optim.SGD(model.parameters(), lr=0.1)", mode="eval").body))
    loss = _loss(given.get("loss", ast.Name("mean_over_window")), names)
    stages = {name: _stage(given[name], names) for name in STAGES if name in given}
    stages = {"step": f"{optimizer}.step()", "clear": f"{optimizer}.zero_grad()", **stages}
    for keyword in call.keywords:
        if keyword.arg is None:  # **stages
            handed = names.get(ast.unparse(keyword.value), keyword.value)
            text = ast.unparse(handed) if isinstance(handed, ast.expr) else ""
            if "scaled(" in text:
                loss = f"scaler.scale({loss})"
                stages |= {"step": f"scaler.step({optimizer})", "after_step": "scaler.update()"}
                if "after_step" in text and "nothing" in text:
                    stages |= {"after_step": "pass", "after_micro_batch": "scaler.update()"}
            elif ".stages()" in text:
                stages |= {"before_backward": "model.zero_grad()", "after_backward": "for total, p in pairs: total += p.grad"}
                stages |= {"before_step": "for total, p in pairs: p.grad = total", "after_step": "buffer.empty()"}
    text = LOOP.replace("LOSS", loss).replace("WINDOWS", "windows")
    for name in STAGES:
        text = text.replace(f" {name}\n", f" {stages.get(name, 'pass')}\n")
    return ast.parse(text if optimizer in names else f"{optimizer} = {made}{text}").body


def _stage(node, names):
    """Return the statement that calls a stage."""
    handed = names.get(ast.unparse(node), node)
    match handed:
        case ast.Name(id="nothing"):
            return "pass"
        case ast.Lambda():
            return ast.unparse(handed.body)
        case ast.Call() if ast.unparse(handed.func) == "frame.clip":
            model, bound = map(ast.unparse, handed.args)
            return f"clip_grad_norm_({model}.parameters(), {bound})"
        case ast.FunctionDef():
            simple = len(handed.body) == 1 and isinstance(handed.body[0], ast.Expr)
            return ast.unparse(handed.body[0]) if simple else f"{ast.unparse(node)}()"
    return f"{ast.unparse(node)}()"


def _loss(node, names):
    """Return the expression of a micro-batch's loss, over `model`, `ids` and `window`."""
    match node:
        case ast.Name(id=name) if name in names:
            return _loss(names[name], names)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in LOSSES:
            return LOSSES[name]
        case ast.Call(args=[loss, by]) if ast.unparse(node.func) in ("divided", "frame.divided"):
            return f"({_loss(loss, names)}) / ({ast.unparse(by)})"
        case ast.Lambda(body=body):
            return _renamed(body, node.args)
        case ast.FunctionDef(body=[ast.Return(value=ast.expr() as value)]):
            return _renamed(value, node.args)
        case ast.FunctionDef(name=name):
            return f"{name}(model, ids, window)"
    return f"({ast.unparse(node)})(model, ids, window)"


def _renamed(node, arguments):
    if arguments.vararg is not None:  # `lambda *of: mean_over_window(*of) + ...`
        return ast.unparse(node).replace("mean_over_window(*of)", LOSSES["mean_over_window"])
    names = dict(zip([one.arg for one in arguments.args], ("model", "ids", "window"), strict=True))
    node = ast.parse(ast.unparse(node), mode="eval").body
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            inner.id = names.get(inner.id, inner.id)
    return ast.unparse(node).replace("mean_over_window(model, ids, window)", LOSSES["mean_over_window"])
