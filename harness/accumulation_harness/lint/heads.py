"""Heads of transformers whose forward takes `**kwargs`, so that a Trainer does not divide, and whose loss is a plain mean."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.scope import Scope
from accumulation_harness.lint.source import Source
from accumulation_harness.lint.trainers import COUNT, with_bases

FLAG = "accepts_loss_kwargs"
OUR_OWN = {"loss_function"}  # what transformers' models inherit


def hits(source: Source) -> Iterator[Hit]:
    """Yield the first loss of each such forward that is a mean over the micro-batch."""
    if "labels" not in source.text:
        return
    classes = {node.name: node for node in words.inside(source.tree, ast.ClassDef)}
    for node in classes.values():
        family = list(with_bases(node, classes))
        bases = {words.last(base) for one in family for base in one.bases}
        if any(base.endswith("pretrainedmodel") for base in bases) and not any(map(_is_flagged, family)):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    yield from _hits(source, method)


def _is_flagged(node: ast.ClassDef) -> bool:
    return FLAG in words.names(node)


def _hits(source: Source, method: ast.FunctionDef) -> Iterator[Hit]:
    labels = next((one for one in (*method.args.args, *method.args.kwonlyargs) if one.arg == "labels"), None)
    if labels is None or method.args.kwarg is None or COUNT in names_in(method):
        return
    if labels.annotation is not None and "list" in ast.unparse(labels.annotation).lower():
        return  # no tensor: a Trainer counts nothing, and divides
    rest = method.args.kwarg.arg
    losses = [call for call in Scope(method).calls() if _is_loss(source, call) and "labels" in names_in(call)]
    if losses and not any(_is_given(call, rest) for call in losses):
        sentence = f"`{method.name}` takes **{rest} and its loss is a mean without `{COUNT}`: a Trainer does not divide it either"
        yield Hit.at(losses[0], Cause.loss_not_divided, sentence)


def names_in(node: ast.AST) -> set[str]:
    """Return the names and strings inside a node."""
    return words.names(node) | {one.value for one in words.inside(node, ast.Constant) if isinstance(one.value, str)}


def _is_loss(source: Source, call: ast.Call) -> bool:
    """Whether a call computes a mean loss: one of torch's, or the function that transformers' models inherit."""
    name = words.last(call.func)
    made = [call.func] if isinstance(call.func, ast.Call) else source.made.get(name, [])
    torch_loss = [one for one in made if words.last(one.func).endswith("loss") and words.last(one.func) != "loss"]
    if name in words.MEAN_LOSSES or torch_loss:
        return not any(keyword.arg == "reduction" for one in (call, *torch_loss) for keyword in one.keywords)
    return name in OUR_OWN


def _is_given(call: ast.Call, rest: str) -> bool:
    """Whether a call is handed all that the forward was given besides."""
    return any(keyword.arg is None and rest in names_in(keyword.value) for keyword in call.keywords)
