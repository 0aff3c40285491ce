"""Files under `data.root`: regular ones of a bounded size, read whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from accumulation_harness.config import ConfigError


def read_data(root: str, file: Path, most: int) -> bytes:
    """Content of a file of at most `most` bytes. ConfigError for anything else: a pipe would wait, a device may have no end."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ConfigError("data.root", root, f"a regular file {file.name}")
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError("data.root", root, f"a readable {file.name} ({error.strerror})") from error
    if len(content) > most:
        raise ConfigError("data.root", root, f"at most {most:,} bytes in {file.name}")
    return content
