"""Subclasses of transformers' Trainer whose own loss the trainer takes for one that is divided already."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.source import Source

BASES = {"Trainer", "Seq2SeqTrainer", "HfTrainer", "HFTrainer", "SFTTrainer"}
FLAGS = {"model_accepts_loss_kwargs", "loss_is_scaled_for_ga"}
COUNT = "num_items_in_batch"


def hits(source: Source) -> Iterator[Hit]:
    """Yield each `compute_loss` that returns a mean over the micro-batch and does not say so."""
    if "compute_loss" not in source.text:
        return
    classes = {node.name: node for node in words.inside(source.tree, ast.ClassDef)}
    for node in classes.values():
        if is_trainer(node, classes):
            flagged = any(_sets_flag(one) or _has_own_step(one) for one in with_bases(node, classes))
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "compute_loss" and _is_own_mean(method) and not flagged:
                    yield _hit(method)


def _hit(method: ast.FunctionDef) -> Hit:
    sentence = (
        f"this loss ignores `{COUNT}`, and for a model whose forward takes **kwargs the Trainer does not divide it by the number "
        "of micro-batches: use the count, or set `loss_is_scaled_for_ga = False` (before 5.19: `self.model_accepts_loss_kwargs`)"
    )
    return Hit(method.lineno, method.col_offset + 1, Cause.loss_not_divided, sentence, method.body[0].lineno)


def with_bases(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield a class and those of its bases that are in the same file."""
    yield node
    for base in node.bases:
        other = classes.get(words.dotted(base))
        if other is not None and other is not node:
            yield from with_bases(other, classes)


def is_trainer(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Whether a class is a subclass of one of transformers' trainers that leave the flags alone."""
    bases = [base for one in with_bases(node, classes) for base in one.bases if words.dotted(base) not in classes]
    names = {words.dotted(base).rpartition(".")[2] for base in bases if words.dotted(base)}
    return bool(names & BASES) and not any(name.endswith("Trainer") and name not in BASES for name in names)


def _is_own_mean(method: ast.FunctionDef) -> bool:
    """Whether a method is given the count of the window's items and makes no use of it, nor divides by itself."""
    arguments = [one.arg for one in (*method.args.args, *method.args.kwonlyargs)]
    if arguments[1:3] != ["model", "inputs"] or (COUNT not in arguments and method.args.kwarg is None):
        return False  # another signature: no Trainer since 4.46 calls it
    body = ast.Module(method.body, [])
    rest = {method.args.kwarg.arg} if method.args.kwarg else set()
    used = {node.id for node in words.inside(body, ast.Name) if isinstance(node.ctx, ast.Load)}
    returns = any(node.value is not None for node in words.inside(body, ast.Return))
    return returns and _is_of_language_model(body) and COUNT not in used and not rest & used and not words.accumulates(body)


def _is_of_language_model(body: ast.Module) -> bool:
    """Whether a loss is made of logits and labels, or is the Trainer's own: a Trainer counts the items of "labels".

    What other models return as their loss may be right: where their forward takes no **kwargs, a Trainer divides.
    """
    labels = any(node.value == "labels" for node in words.inside(body, ast.Constant))
    logits = any("logits" in name for name in words.identifiers(body))
    own = any(words.last(node.func) == "compute_loss" for node in words.inside(body, ast.Call))
    return own or (logits and labels)


def _has_own_step(node: ast.ClassDef) -> bool:
    """Whether a class divides, or not, in a step of its own."""
    return any(isinstance(one, ast.FunctionDef) and one.name == "training_step" for one in node.body)


def _sets_flag(node: ast.ClassDef) -> bool:
    named = (one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))
    return any(isinstance(one.ctx, ast.Store) and words.last(one) in FLAGS for one in named)
