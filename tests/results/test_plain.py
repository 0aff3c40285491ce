"""Values to plain JSON types and back, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from accumulation_harness.results.plain import from_plain, to_plain


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True)
class Part:
    size: float
    name: str | None = None


@dataclass(frozen=True)
class Whole:
    colours: tuple[Colour, ...]
    pair: tuple[int, float]
    by_colours: Mapping[tuple[Colour, ...], float]
    parts: Mapping[str, Part] = field(default_factory=dict)
    best: Part | None = None
    is_good: bool = False


WHOLE = Whole(
    (Colour.red, Colour.blue), (2, 0.1 + 0.2), {(): math.inf, (Colour.red,): 1e-300}, {"a": Part(-0.0)}, Part(3, "b"), True
)


def test_a_value_comes_back_as_it_was() -> None:
    plain = json.loads(json.dumps(to_plain(WHOLE)))
    again = from_plain(Whole, plain)
    assert again == WHOLE and math.copysign(1, again.parts["a"].size) == -1 and again.pair[1].hex() == (0.1 + 0.2).hex()
    assert again != Whole((Colour.red,), (2, 0.3), {})
    assert type(again.colours[0]) is Colour and from_plain(dict[str, Part], to_plain({"x": Part(1.5)})) == {"x": Part(1.5)}


def test_a_number_that_is_none_comes_back_too() -> None:
    assert math.isnan(from_plain(Part, json.loads(json.dumps(to_plain(Part(math.nan))))).size)


@pytest.mark.parametrize(
    "changes",
    [
        {"colours": ["green"]}, {"colours": "red"}, {"pair": [1]}, {"pair": [1.5, 2.0]}, {"is_good": 1}, {"best": []},
        {"by_colours": {"red": 1.0}}, {"parts": [["a", {"size": "x", "name": None}]]}, {"unknown": 1},
    ],
)  # fmt: skip
def test_another_record_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(Whole, to_plain(WHOLE) | changes)
