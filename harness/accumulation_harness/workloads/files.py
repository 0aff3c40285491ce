"""Data from files of a local folder, `data.root`. Nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path

from accumulation_harness.config import ConfigError
from accumulation_harness.system.files import read_file


def read_data(root: str, file: Path, most: int) -> bytes:
    """Content of a regular file of at most `most` bytes.

    Args:
        root: The folder, for the message.
        file: A file in it.
        most: Bytes that it may have.

    Returns:
        Its bytes.

    Raises:
        ConfigError: It is no regular file, cannot be read or is too long.
    """
    try:
        content = read_file(file, most + 1)
    except OSError as error:
        raise ConfigError("data.root", root, f"a readable {file.name} ({error.strerror})") from error
    if len(content) > most:
        raise ConfigError("data.root", root, f"at most {most:,} bytes in {file.name}")
    return content
