"""`StrEnum`, which Python has from 3.11 on: audits run beside trainers that pin 3.10."""

from __future__ import annotations

import enum
import sys

__all__ = ["StrEnum"]

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:

    class StrEnum(str, enum.Enum):
        """Members are texts, and are printed as such."""

        __str__ = str.__str__
        __format__ = str.__format__
