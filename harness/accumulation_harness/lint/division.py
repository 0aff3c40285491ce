"""Losses of accumulating loops: not divided, divided twice, divided by what a short window does not hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.loss import Loss, losses
from accumulation_harness.lint.scope import stored
from accumulation_harness.lint.source import Source
from accumulation_harness.lint.window import Window

WEIGHING = ("div", "scale", "mul", "average", "normali", "reduce", "sync")  # in the names of functions that change gradients


def hits(source: Source) -> Iterator[Hit]:
    """Yield what is wrong with how a micro-batch's loss is weighed in its window."""
    for window in source.windows:
        for backward, loss in losses(source, window):
            if divides_by_itself(source, backward, window):
                yield from _divided_twice(backward, loss)
            else:
                yield from _not_divided(source, window, backward, loss)
                yield from _divided_by_both(backward, loss)
                yield from _short_window(window, backward, loss)
            yield from _mean_of_means(source, window, backward, loss)
            if loss.uneven and not loss.scaled:
                sentence = "a part of the loss is divided by the number of micro-batches, and what is added to it is not"
                yield Hit.at(backward, Cause.auxiliary_loss_scale, sentence)


def divides_by_itself(source: Source, backward: ast.Call, window: Window) -> bool:
    """Whether the `backward` of a framework divides by the number of micro-batches: accelerate's, told that number."""
    if "accelerator" not in words.last(words.receiver(backward)):
        return False
    made = (call for calls in source.made.values() for call in calls if words.last(call.func) == "accelerator")
    told = (keyword.arg for call in made for keyword in call.keywords)
    return window.by_accelerate or any(name and words.ACCUMULATION.search(name) for name in told)


def weighs_by_itself(source: Source, backward: ast.Call) -> bool:
    """Whether `backward` may divide, by settings that do not stand in the text: accelerate's, DeepSpeed's."""
    of = words.last(words.receiver(backward))
    if source.mentions("opacus"):  # its optimizer divides by the expected number of rows
        return True
    engine = source.mentions("deepspeed") and bool(backward.args)
    return "accelerator" in of or "engine" in of or "booster" in of or engine


def touches_gradients(window: Window) -> bool:
    """Whether the function writes to `.grad`, or calls something that may divide gradients: it may weigh them there."""
    for node in window.scope.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        name = words.last(node.func) if isinstance(node, ast.Call) else ""
        if "grad" in name and name not in words.CLIPS and any(word in name for word in WEIGHING):
            return True
    return False


def _not_divided(source: Source, window: Window, backward: ast.Call, loss: Loss) -> Iterator[Hit]:
    if loss.divisors or loss.scaled or weighs_by_itself(source, backward) or touches_gradients(window):
        return
    told = all(_is_mean(source, window, leaf, kind) for leaf in loss.leaves for kind in loss.kinds)
    if loss.leaves and told:
        number = f" by `{ast.unparse(window.number)}`" if window.number is not None else ""
        yield Hit.at(backward, Cause.loss_not_divided, f"the micro-batches' mean losses are added: none is divided{number}")


def _is_mean(source: Source, window: Window, leaf: ast.expr, kind: str) -> bool:
    """Whether a loss is a mean over its micro-batch, as far as names tell; a model's own loss where accumulation is named."""
    if words.accumulates(leaf) or (window.number is not None and ast.unparse(window.number) in ast.unparse(leaf)):
        return False
    if kind == "mean":
        return True
    name = words.last(leaf.func) if isinstance(leaf, ast.Call) else ""
    of_model = kind == "model" or (words.MODEL.search(name) is not None and name not in source.functions)
    return of_model and window.named


def _divided_twice(backward: ast.Call, loss: Loss) -> Iterator[Hit]:
    if loss.by_number and not loss.scaled:
        by = ast.unparse(loss.by_number[0])
        sentence = f"the loss is divided by `{by}`, and `{ast.unparse(backward.func)}` divides by it again"
        yield Hit.at(backward, Cause.loss_divided_twice, sentence)


def _divided_by_both(backward: ast.Call, loss: Loss) -> Iterator[Hit]:
    """The divisors are what the whole window holds, and the number of its micro-batches besides."""
    whole = [by for by in loss.divisors if any(map(words.WHOLE.search, words.identifiers(by))) and not words.accumulates(by)]
    number = [by for by in loss.by_number if isinstance(by, (ast.Name, ast.Attribute))]
    if whole and number and not loss.scaled:
        both = f"`{ast.unparse(whole[0])}`, and by `{ast.unparse(number[0])}` once more"
        yield Hit.at(backward, Cause.loss_divided_twice, f"the loss is divided by {both}")


def _short_window(window: Window, backward: ast.Call, loss: Loss) -> Iterator[Hit]:
    """The boundary lets a shorter window through at the end (`or i == len(loader) - 1`), and the divisor knows nothing of it."""
    if not isinstance(window.boundary, ast.BoolOp) or not isinstance(window.boundary.op, ast.Or) or window.number is None:
        return
    others = [value for value in window.boundary.values if not any(isinstance(node, ast.Mod) for node in ast.walk(value))]
    at_the_end = any(
        "len(" in ast.unparse(value) or any("last" in name or name.startswith("num_") for name in words.identifiers(value))
        for value in others
    )
    by = {ast.unparse(divisor) for divisor in loss.divisors}
    number = ast.unparse(window.number)
    if at_the_end and number in by and not loss.scaled and not set(words.identifiers(window.number)) & _lowered(window):
        sentence = f"the last window of an epoch may hold fewer micro-batches than `{number}`, by which its losses are divided"
        yield Hit.at(backward, Cause.short_window_divided_by_n, sentence)


def _lowered(window: Window) -> set[str]:
    return {name.lower() for name in stored(window.loop)}


def _mean_of_means(source: Source, window: Window, backward: ast.Call, loss: Loss) -> Iterator[Hit]:
    divided = bool(loss.by_number) or divides_by_itself(source, backward, window)
    if loss.padded and divided and not loss.scaled and not touches_gradients(window):
        sentence = "each micro-batch is averaged over its own valid labels, and the means count alike"
        yield Hit.at(backward, Cause.mean_of_means, sentence)
