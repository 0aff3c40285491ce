"""Processes that end when they should: on request, or with the process that started them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from threading import Thread

GRACE_SECONDS = 5.0  # to end by themselves


def end(links: Sequence[Connection], workers: Sequence[BaseProcess]) -> None:
    """Ask workers to end, by a None through their `links`, and kill those that do not within GRACE_SECONDS."""
    for link in links:
        with suppress(OSError):
            link.send(None)
    for worker in workers:
        worker.join(GRACE_SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()
    for link in links:
        link.close()


def die_with_parent(last: Callable[[], object] = lambda: None) -> Thread:
    """Have a thread end this process as soon as its parent is gone, after a call of `last`.

    Without it the children of a killed parent would go on, hold the locks of their trials and leave their files behind.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        last()
        os._exit(1)

    guard = Thread(target=watch, daemon=True)
    guard.start()
    return guard
