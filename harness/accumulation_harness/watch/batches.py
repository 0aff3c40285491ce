"""The batches of the open window, kept for its replay."""

from __future__ import annotations

from typing import Any


class Batches:
    """By reference; of a forward that was called with keywords alone, their mapping."""

    def __init__(self, *, keep: bool) -> None:
        self.keep, self.paused = keep, False
        self.window: list[Any] = []
        self._handed: list[Any] = []
        self._seen: list[Any] = []

    def hand_over(self, batch: Any) -> None:
        """The loop hands the batch of the next backward over."""
        if self.keep and not self.paused:
            self._handed.append(batch)

    def see(self, args: Any, kwargs: Any) -> None:
        """The model was called so."""
        if self.keep and not self.paused:
            self._seen.append(dict(kwargs) if kwargs and not args else args[0] if len(args) == 1 and not kwargs else args)

    def end(self, *, reached: bool) -> None:
        """A backward has ended; what was handed over comes before what was seen."""
        if reached:
            self.window.extend(self._handed or self._seen)
        self._handed, self._seen = [], []

    def forget(self) -> None:
        """The window has ended."""
        self.window = []
