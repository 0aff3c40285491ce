"""Worker processes that answer over pipes, until they are sent None."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

GRACE_SECONDS = 5.0  # to end by themselves


def end(links: Sequence[Connection], workers: Sequence[BaseProcess]) -> None:
    """Ask all to end, and kill those that do not."""
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
