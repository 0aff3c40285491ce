"""Classes of transformers that a Trainer does not divide for: its subclasses with an own loss, and heads whose loss is a mean.

A head is a model's forward that takes `**kwargs` and labels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.source import Source

BASES = {"Trainer", "Seq2SeqTrainer", "HfTrainer", "HFTrainer", "SFTTrainer"}
FLAGS = {"model_accepts_loss_kwargs", "loss_is_scaled_for_ga"}  # of a trainer
FLAG = "accepts_loss_kwargs"  # of a head
NEWER = re.compile(r"Unpack\[|auto_docstring|can_return_tuple|loss_function|logits_to_keep|ALL_ATTENTION_FUNCTIONS")
"""What is in the heads of transformers since a Trainer leaves the division to them (4.46); older ones are notes."""
COUNT = "num_items_in_batch"
NUMBER = "gradient_accumulation_steps"
SHORT = f"the last window of an epoch may hold fewer micro-batches: the Trainer has their number in `self.current_{NUMBER}`"


def hits(source: Source) -> Iterator[Hit]:
    """Yield each such `compute_loss`, and the first loss of each such forward.

    Args:
        source: A module.

    Yields:
        The hits.
    """
    is_read = "compute_loss" in source.text or "labels" in source.text
    classes = source.classes if is_read else {}
    for node in classes.values():
        family = list(source.family(node.name))
        bases = [base for one in family for base in one.bases]
        foreign = {words.dotted(base).rpartition(".")[2] for base in bases if words.dotted(base) not in classes} - {""}
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        loss, forward = methods.get("compute_loss"), methods.get("forward")
        if (
            loss is not None
            and _is_trainer(foreign)
            and _is_own_mean(loss, _reached(source, node.name, loss))
            and not any(map(_divides_itself, family))
        ):
            yield _hit(loss)
        own = [one for one in (loss, methods.get("training_step")) if one is not None]
        if (_is_trainer(foreign) or any(flag in source.text for flag in FLAGS)) and "current_" + NUMBER not in source.text:
            for divided in (found for one in own for found in words.inside(one, ast.BinOp)):
                if isinstance(divided.op, ast.Div) and words.dotted(divided.right).endswith(f"args.{NUMBER}"):
                    yield Hit.at(divided, Cause.short_window_divided_by_n, SHORT)
        is_model = any(words.last(base).endswith("pretrainedmodel") for base in bases)
        if forward is not None and is_model and not any(FLAG in words.names(one) for one in family):
            yield from _of_head(source, forward)


def _hit(method: ast.FunctionDef) -> Hit:
    sentence = (
        f"this loss ignores `{COUNT}`, and for a model whose forward takes **kwargs the Trainer does not divide it by the number "
        "of micro-batches: use the count, or set `loss_is_scaled_for_ga = False` (before 5.19: `self.model_accepts_loss_kwargs`)"
    )
    return Hit(method.lineno, method.col_offset + 1, Cause.loss_not_divided, sentence, method.body[0].lineno)


def _is_trainer(foreign: set[str]) -> bool:
    """Whether, by bases that are in other files, a class is one of transformers' trainers that leave the flags alone."""
    return bool(foreign & BASES) and not any(name.endswith("Trainer") for name in foreign - BASES)


def _reached(source: Source, of: str, method: ast.FunctionDef) -> ast.Module:
    """Return a method's body and those of the methods of `self` that it leads to."""
    found: list[ast.AST] = [method]
    for one in found:
        names = [
            call.func.attr
            for call in words.inside(one, ast.Call)
            if isinstance(call.func, ast.Attribute) and words.dotted(call.func.value) == "self"
        ]
        found += [other for name in names if (other := source.method(of, name)) is not None and other not in found]
    return ast.Module([statement for one in found for statement in one.body], [])  # type: ignore[attr-defined]


def _is_own_mean(method: ast.FunctionDef, reached: ast.Module) -> bool:
    """Whether a method is given the count of the window's items and makes no use of it, nor divides by itself."""
    arguments = [one.arg for one in (*method.args.args, *method.args.kwonlyargs)]
    if arguments[1:3] != ["model", "inputs"] or (COUNT not in arguments and method.args.kwarg is None):
        return False  # another signature: no Trainer since 4.46 calls it
    body = ast.Module(method.body, [])
    rest = {method.args.kwarg.arg} if method.args.kwarg else set()
    used = {node.id for node in words.inside(body, ast.Name) if isinstance(node.ctx, ast.Load)}
    return (
        _is_of_language_model(reached)
        and COUNT not in used
        and not rest & used
        and not any(map(words.NUMBER.search, words.identifiers(reached)))
    )


def _is_of_language_model(body: ast.Module) -> bool:
    """Whether a loss is made of logits and labels, or is the Trainer's own: a Trainer counts the items of "labels".

    What other models return as their loss may be right: where their forward takes no **kwargs, a Trainer divides.

    Returns:
        True where the Trainer would divide by the number of labels.
    """
    labels = any(node.value == "labels" for node in words.inside(body, ast.Constant))
    logits = any("logits" in name for name in words.identifiers(body))
    own = any(words.last(node.func) == "compute_loss" for node in words.inside(body, ast.Call))
    return own or (logits and labels)


def _divides_itself(node: ast.ClassDef) -> bool:
    """Whether a class sets a flag, hands a loss to its base, or divides, or not, in a step of its own."""
    if any(one.arg == "compute_loss_func" for one in words.inside(node, ast.keyword)):
        return True
    named = (one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))
    flagged = any(isinstance(one.ctx, ast.Store) and words.last(one) in FLAGS for one in named)
    return flagged or any(isinstance(one, ast.FunctionDef) and one.name == "training_step" for one in node.body)


def _of_head(source: Source, method: ast.FunctionDef) -> Iterator[Hit]:
    labels = next((one for one in (*method.args.args, *method.args.kwonlyargs) if one.arg == "labels"), None)
    if labels is None or method.args.kwarg is None or COUNT in _names_in(method):
        return
    if labels.annotation is not None and "list" in ast.unparse(labels.annotation).lower():
        return  # no tensor: a Trainer counts nothing, and divides
    rest = method.args.kwarg.arg
    losses = [call for call in words.inside(method, ast.Call) if _is_loss(source, call) and "labels" in _names_in(call)]
    if losses and not any(_is_given(call, rest) for call in losses):
        sentence = f"`{method.name}` takes **{rest} and its loss is a mean without `{COUNT}`: a Trainer does not divide it either"
        yield Hit.at(losses[0], Cause.loss_not_divided, sentence, sure=NEWER.search(source.text) is not None)


def _names_in(node: ast.AST) -> set[str]:
    """Return the names and strings inside a node."""
    return words.names(node) | {one.value for one in words.inside(node, ast.Constant) if isinstance(one.value, str)}


def _is_loss(source: Source, call: ast.Call) -> bool:
    """Whether a call computes a mean loss: one of torch's, or the function that transformers' models inherit."""
    name = words.last(call.func)
    torch_loss = [
        one for one in source.made.get(name, []) if words.last(one.func).endswith("loss") and words.last(one.func) != "loss"
    ]
    if name in words.LOSSES or torch_loss:
        return not any(keyword.arg == "reduction" for one in (call, *torch_loss) for keyword in one.keywords)
    return name == "loss_function"


def _is_given(call: ast.Call, rest: str) -> bool:
    """Whether a call is handed all that the forward was given besides."""
    return any(keyword.arg is None and rest in _names_in(keyword.value) for keyword in call.keywords)
