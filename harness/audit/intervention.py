"""What the audit changes in an extra run of the training function, to learn what it cannot learn by watching."""

from __future__ import annotations

from dataclasses import dataclass

from harness.audit.evidence import Run


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """Nothing is changed by default: the function is only watched."""

    perturb: float = 0.0  # move every parameter by this relative amount, with alternating signs, before each window
    follow: Run | None = None  # after step t, put the parameters this run had after step t: steps compare one by one
    probe: bool = False  # at the first backward, ask whether the loss couples the outputs of different rows
    calm: frozenset[str] = frozenset()  # "dropout": no dropout; "batch_norm": running statistics instead of the batch's


WATCH = Intervention()
