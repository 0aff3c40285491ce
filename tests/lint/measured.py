"""What the lint says of the right and wrong loops that the audit is tried on."""

import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from accumulation_harness.lint.__main__ import found
from accumulation_harness.lint.source import Source
from tests.audit.loops import (
    habits,
    lookalikes,
    lost_gradients,
    mixed_losses,
    order_seeds,
    own_weights,
    right_loops,
    unusual_loops,
    wrong_loops,
)  # fmt: skip
from tests.lint.written_out import functions, written_out

SEEN: tuple[ModuleType, ...] = (right_loops, wrong_loops, unusual_loops, mixed_losses, lookalikes, lost_gradients, habits)
UNSEEN: tuple[ModuleType, ...] = (order_seeds, own_weights)  # written by others while the rules were


@dataclass(frozen=True)
class Told:
    """A loop, what is wrong with it (nothing: it is right), and what the lint says of it."""

    name: str
    causes: frozenset[str]
    told: frozenset[str]


@cache
def loops(modules):
    """Each loop is read alone, written out."""
    results = []
    for module in modules:
        texts = functions(module)
        wrong = {loop.__name__: causes for loop, causes in getattr(module, "WRONG", {}).items()}
        wrong |= {loop.__name__: causes for loop, causes in getattr(module, "AT_EVERY_N", {}).items()}
        for name in [*wrong, *(loop.__name__ for loop in module.__dict__.get("RIGHT", ()))]:
            told = {str(hit.cause) for hit in found(Source(written_out(texts[name])))}
            results.append(Told(name, frozenset(wrong.get(name, ())), frozenset(told)))
    return results


if __name__ == "__main__":
    for one in loops((*SEEN, *UNSEEN)):
        if one.told or "-v" in sys.argv:
            print(f"{one.name}: {', '.join(one.causes) or 'right'} -> {', '.join(one.told) or '-'}")
