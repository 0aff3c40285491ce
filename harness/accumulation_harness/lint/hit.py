"""One line of source that does something else with accumulation than without."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.address import page_of


@dataclass(frozen=True, order=True)
class Hit:
    """A place and what is wrong there; `last_line` is where the expression ends. One that is not sure is a note to look at."""

    line: int
    column: int  # counted from 1, as editors do
    cause: Cause
    sentence: str
    last_line: int
    sure: bool = True

    @classmethod
    def at(cls, node: ast.expr | ast.stmt, cause: Cause, sentence: str, *, sure: bool = True) -> Hit:
        """Return the hit at an expression or statement."""
        return cls(node.lineno, node.col_offset + 1, cause, sentence, node.end_lineno or node.lineno, sure)

    def told(self) -> str:
        """`CAUSE: sentence (address of its page)`, as it is printed behind the place; `look: ` before it where it is not sure."""
        return f"{'' if self.sure else 'look: '}{self.cause}: {self.sentence} ({page_of(self.cause)})"
