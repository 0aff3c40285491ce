"""What names in training code usually stand for, and how a name is read off an expression."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TypeVar

NUMBER = re.compile(
    r"accum|grad_acc|(^|_)(micro_?batch(es)?|micro_?steps?|gas)$|num_?micro|n_micro|update_freq|update_every|iter_size"
    r"|steps_per_update|batches_per_update|batches_per_step|batch_split|subdivisions|(^|_)n_acc$|acc_(freq|steps)$"
)
STRICT = re.compile(r"accum|micro|grad_acc")  # those of them that are used for nothing else
COUNTED = re.compile(r"steps?$|iters?$|iterations$|batches$|freq|every|factor|(^|_)num|(^|_)n_")  # of a function: what it returns
NO_NUMBER = re.compile(r"loss|count|samples|tokens|is_|do_|accumulat(ed|ing|or|e_grads?)$|_fn$|(^|_)last|size|idx|index")
BOUNDARY = re.compile(
    r"accum|sync_grad|^(is_?)?last$|last_micro|is_last|need_update|need_step|update_grad|do_update|do_step|(should|will)_(step|update|sync)"
    r"|boundary|is_update|is_step|optimi[sz]er?_step_now|step_now|end_of_window|is_grad_step"
)
WITHIN = re.compile(r"accumulating|is_accum|do_accum|no_sync")  # true before the boundary
OPTIMIZER = re.compile(r"optim|^o(pts?)?$|^opt_|_opt$|adam|sgd$|adafactor|lion$|shampoo|muon|rmsprop|adagrad|lbfgs")
SCALER = re.compile(r"scalers?$|^scaler")
JUDGE = re.compile(r"disc|critic|(^|_)(net)?d(_|$)|netd$")  # the discriminator of a GAN, and its optimizer
SCHEDULE = re.compile(r"sched|^lr_|warmup")
AVERAGE = re.compile(r"(^|_)ema(_|$)|ema_?(model|net|unet)?$|averaged_model|swa_model")
MOVES = re.compile(r"^_?(update_\w*(ema(_|$)|momentum|teacher|moving_average)|(ema|momentum)_update)")  # a function that averages
MODEL = re.compile(r"(^|_)(model|net|network|gpt|transformer|unet|vae|diffusion|ddp|policy|student|wrapper|forward)$")
WHOLE = re.compile(r"num_items_in_batch|(^|_)window$|total_(tokens|items|samples)|global_batch")  # all that a window holds
COUNT = re.compile(r"\blen\(|batch_size|\.size\(0\)|\.shape\[0\]")  # rows of a micro-batch, in an expression
SCALE = re.compile(r"scale|inv|frac|world|weight_of_batch|accum|micro")
LOSS = re.compile(r"loss(es)?(_dict)?")  # of what a model returns
PIECE = re.compile(r"(micro|mini|sub|chunk)_?(batch|bs)(?!es)")  # the size of a micro-batch
CRITERION = re.compile(r"criterion|crit$|loss_?(fn|func|function|fct|module|layer)$")
FRAMEWORK = re.compile(r"accelerator|fabric|engine|booster|^self$|strategy|trainer|optim")
LOOKS = re.compile(r"isfinite|isnan|isinf|norm|\.(max|min|abs|mean|shape|dtype|device)\b|isinstance")  # at a gradient
CLIPS = re.compile(  # a call that clips gradients, and none that makes or sets up what does
    r"^(?!_?(get|set|is|has|make|create|build|configure|add|should|use|need|register|log|test)_).*(clip_\w*grad|grad\w*_clip(_fn|_norm)?_?$)"
)
LOSSES = {
    "cross_entropy", "mse_loss", "l1_loss", "nll_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "gaussian_nll_loss",
}  # fmt: skip
LOSS_MODULES = {
    "crossentropyloss", "mseloss", "l1loss", "nllloss", "smoothl1loss", "huberloss", "bceloss", "bcewithlogitsloss",
    "cosineembeddingloss", "ctcloss", "gaussiannllloss",
}  # fmt: skip


Node = TypeVar("Node", bound=ast.AST)


@lru_cache(4096)
def text(node: ast.AST) -> str:
    """Return a node as it may be written; it is asked for the same ones again and again.

    Args:
        node: An expression or a statement.

    Returns:
        Its source text.
    """
    return ast.unparse(node)


def inside(node: ast.AST, kinds: type[Node] | tuple[type[Node], ...]) -> Iterator[Node]:
    """Yield a node and those below it, of these kinds.

    Args:
        node: Where to look.
        kinds: Types of nodes.

    Returns:
        The nodes, outer ones first.
    """
    return (one for one in ast.walk(node) if isinstance(one, kinds))


def names(node: ast.AST) -> set[str]:
    """Return the variables inside a node.

    Args:
        node: Where to look.

    Returns:
        Their names.
    """
    return {one.id for one in inside(node, ast.Name)}


def dotted(node: ast.AST | None) -> str:
    """Return `a.b.c` of such an expression (of `a[0].b`: `a.b`), and an empty string of any other.

    Args:
        node: An expression.

    Returns:
        The name, or an empty text.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def end(name: str) -> str:
    """Return the last identifier of a dotted name, in lower case.

    Args:
        name: A dotted name, with or without `()`.

    Returns:
        One identifier.
    """
    return name.rstrip("()").rpartition(".")[2].lower()


def last(node: ast.AST | None) -> str:
    """Return the last identifier of an expression, in lower case.

    Args:
        node: An expression.

    Returns:
        One identifier, or an empty text.
    """
    return node.attr.lower() if isinstance(node, ast.Attribute) else end(dotted(node))


def receiver(call: ast.Call) -> ast.expr | None:
    """Return `a` of `a.f()`.

    Args:
        call: A call.

    Returns:
        The expression, or None of `f()`.
    """
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def identifiers(node: ast.AST) -> Iterator[str]:
    """Yield every identifier and every string key inside an expression, in lower case.

    Args:
        node: Where to look.

    Yields:
        Names, attributes and keys.
    """
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
                yield str(name).lower()


@lru_cache(4096)
def is_of_optimizers(loop: ast.AST) -> bool:
    """Whether each round of a loop is about another optimizer or scaler, and all of them have every micro-batch.

    Args:
        loop: A loop.

    Returns:
        True for `for optimizer in self.optimizers:`.
    """
    return isinstance(loop, ast.For | ast.AsyncFor) and any(
        OPTIMIZER.search(one) or SCALER.search(one) for one in identifiers(loop.iter)
    )


def batch(node: ast.AST) -> str:
    """Return whether the size of a batch is that of a "piece" or of the "whole"; an empty text where it is none.

    Args:
        node: An expression.

    Returns:
        What the size is of.
    """
    written = " ".join(identifiers(node))
    return "piece" if PIECE.search(written) else "whole" if "batch" in written else ""


@cache
def is_number(name: str) -> bool:
    """Whether a name usually stands for the number of micro-batches in a window, or for the micro-batches themselves.

    Args:
        name: An identifier in lower case.

    Returns:
        True for `accumulation_steps`, `num_batches` and the like.
    """
    return NUMBER.search(name) is not None and NO_NUMBER.search(name) is None
