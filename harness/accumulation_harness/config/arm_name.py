"""The name of an arm: which recipe, cut into how many micro-batches, and which of its repetitions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

FULL, ACCUMULATED, PERMUTED = "full", "accumulated", "permuted"  # the reference, the right recipe, and the control
NULL = "null"  # permuted full batches of the null band

_TEXT = re.compile(r"(.+)-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class ArmName:
    """An arm of a trial; `str` gives its one text form, `name-N` or `name-N.replicate`, which `parse` reads back.

    >>> str(ArmName("accumulated", 4)), str(ArmName("null", 1, 2))
    ('accumulated-4', 'null-1.2')
    """

    name: str  # one of the above, `ulp`, or a fault's or a remedy's name
    accumulation_steps: int = 1
    replicate: int = 0  # of arms that are repeated under another order of the rows

    def __str__(self) -> str:
        return f"{self.name}-{self.accumulation_steps}" + (f".{self.replicate}" if self.replicate else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The arm that `text` names.

        >>> ArmName.parse("scale@1e-3-16")
        ArmName(name='scale@1e-3', accumulation_steps=16, replicate=0)

        Args:
            text: `accumulated-4`, or `null-1.2` for the third replicate of the control.

        Returns:
            Its name, N and replicate.

        Raises:
            ValueError: The text names no arm.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"expected the name of an arm, as accumulated-4 or null-1.2, got {text!r}")
        return cls(found[1], int(found[2]), int(found[3] or 0))

    @property
    def columns(self) -> dict[str, str | int]:
        """What identifies the arm in a step row."""
        return {"arm": self.name, "accumulation_steps": self.accumulation_steps, "replicate": self.replicate}


def arm_of(row: Mapping[str, Any]) -> ArmName:
    """Name the arm that a row of measurements is about.

    >>> str(arm_of({"arm": "accumulated", "accumulation_steps": 4}))
    'accumulated-4'

    Args:
        row: `arm`, `accumulation_steps`, and `replicate` where an arm is repeated.

    Returns:
        The arm's name.
    """
    return ArmName(row["arm"], row["accumulation_steps"], row.get("replicate", 0))


ULP = str(ArmName("ulp"))  # a full batch that starts from weights moved by one ulp
