"""The rules on counted bytes, recorded caches and arithmetic: each ruling has rows that give it, and rows that do not."""

from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.accounting.answers import CLAIMS, arithmetic, cache_ruling

RULES = {claim.id: claim.decide for claim in CLAIMS}
PARAMETERS = 1000


def results(
    *, alive: tuple[int, int, int] = (5, 8, 8), state: int = 8, cast: int = 8, optimizer: str = "adam", pure: bool = True
) -> Results:
    """Bytes of two trials at N = 1, 2 and 8, and of a model cast to 16 bits; the arguments are bytes per parameter.

    `cast`: parameters, gradients and state of the model in 16 bits, together.
    """
    rows = []
    for trial in ("a", "b"):
        about = {"trial": trial, "optimizer": optimizer, "precision": "float32", "num_parameters": PARAMETERS}
        rows += [
            about | {"accumulation_steps": num, "kept_in": "float32", "parameter_bytes": 4 * PARAMETERS,
             "gradient_bytes": 4 * PARAMETERS, "state_bytes": state * PARAMETERS, "alive_bytes": each * PARAMETERS}
            for num, each in zip((1, 2, 8), alive, strict=True)
        ]  # fmt: skip
        if pure:
            halves = {"parameter_bytes": cast * PARAMETERS // 4, "gradient_bytes": cast * PARAMETERS // 4}
            rows += [about | halves | {"accumulation_steps": 1, "kept_in": "bfloat16", "state_bytes": cast * PARAMETERS // 2}]
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())


def test_what_theory_expects() -> None:
    assert {name: decide(results()).verdict for name, decide in RULES.items()} == {one.id: one.expects for one in CLAIMS}
    assert RULES["D7"](results()).measured == pytest.approx(1.3 * 8)


@pytest.mark.parametrize(
    ("given", "fell"),
    [
        (results(alive=(5, 5, 5)), {"D5": Ruling.refuted}),
        (results(alive=(5, 8, 12)), {"D5": Ruling.confirmed}),
        (results(state=0), {"D7": Ruling.confirmed, "D11": Ruling.refuted}),  # 8 bytes either way
        (results(cast=4), {"D7": Ruling.refuted}),
        (results(state=4, pure=False), {"D7": Ruling.needs_full_grid, "D11": Ruling.refuted}),
        (results(optimizer="sgd"), {"D7": Ruling.needs_full_grid, "D11": Ruling.needs_full_grid}),
    ],
)
def test_what_would_change_a_verdict(given: Results, fell: dict[str, Ruling]) -> None:
    assert {name: RULES[name](given).verdict for name in fell} == fell


def caches(*, old: int = 100, new: int = 0, beyond: int = 0) -> pd.DataFrame:
    """Bytes per sample of the caches of two releases, and of those that autograd does not hold."""
    return pd.DataFrame(
        [
            {"version": version, "way": "loop", "micro_batch": b, "cache_bytes": each * b, "not_saved_bytes": beyond * b}
            for version, each in (("4", old), ("5", new)) for b in (1, 2)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (caches(), Ruling.conditional),
        (caches(new=100, beyond=10), Ruling.confirmed),
        (caches(old=0), Ruling.refuted),
        (caches().assign(cache_bytes=[1, 5, 0, 0]), Ruling.needs_full_grid),  # not in proportion to b
    ],
)
def test_d3(rows: pd.DataFrame, verdict: Ruling) -> None:
    assert cache_ruling(rows).verdict == verdict


def test_what_is_calculated_is_not_counted_as_measured() -> None:
    right, wrong = (arithmetic(value, 4.0, "Because.", results()) for value in (4.0, 16.0))
    assert (right.verdict, wrong.verdict) == (Ruling.right_by_arithmetic, Ruling.wrong_by_arithmetic)
    assert right.n == 0 and pd.isna(right.measured)
