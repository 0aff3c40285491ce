"""A scratch folder in which somebody's code runs: it finds what is in its own folder, and what it writes stays here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from accumulation_harness.audit.user_code.imports import replaced

LARGEST_COPY = 1 << 20  # bytes of a file; larger ones are linked
MOST_COPIED = 1 << 26  # bytes in all
MOST_IN_A_FOLDER = 500  # entries; a folder of more holds data, and is linked as a whole
MOST_BESIDE = 100  # entries beside the folder, and beside each that it is in
MOST = 5_000  # entries in all that are looked at
APART = ("__pycache__", "node_modules", "site-packages", "wandb", "mlruns")  # folders that nobody needs one by one
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = ("/dev/", "/proc/", "/sys/")
TOLD = 5  # files that are listed

Deed = Literal["replace", "change", "move"]  # what is about to be done to a file; removing is moving
DEEDS: dict[str, tuple[tuple[int, Deed, int | None], ...]] = {  # event -> (place of the path, deed, place of an open folder)
    "open": ((0, "change", None),),
    "os.mkdir": ((0, "change", 2),),
    "os.remove": ((0, "move", 1),),
    "os.rmdir": ((0, "change", 1),),
    "os.rename": ((0, "move", 2), (1, "move", 3)),
    "os.truncate": ((0, "change", None),),
    "os.chmod": ((0, "change", 2),),
    "os.utime": ((0, "change", 3),),
    "shutil.rmtree": ((0, "change", 1),),
    "sqlite3.connect": ((0, "change", None),),
}
WRITERS = {  # module -> functions of (content, path) that open files by code of their own
    "torch": ("save",),
    "torch.jit": ("save",),
    "safetensors.torch": ("save_file", "serialize_file"),
    "safetensors.numpy": ("save_file", "serialize_file"),
}

_hooked = False
_active: Scratch | None = None
_busy = threading.local()


class Scratch:
    """Images of folders: small files are copied, others are linked, and become copies before they are written to.

    Files outside that were there before are not changed: what would do so raises PermissionError. New ones are told, and left.
    Python's own calls are seen, and `torch.save`; what writes by code of its own into a large file that was there is not.
    """

    def __init__(self, originals: Sequence[Path]) -> None:
        """`originals`: absolute; one that is inside another is part of its image."""
        roots = [path for path in dict.fromkeys(originals) if not any(path != o and path.is_relative_to(o) for o in originals)]
        self.root = Path(os.path.realpath(tempfile.mkdtemp(prefix="scratch-")))
        weakref.finalize(self, shutil.rmtree, self.root, True)
        self.images = {path: self.root / str(k) / path.relative_to(path.anchor) for k, path in enumerate(roots)}
        self.passing = os.path.realpath(tempfile.gettempdir()) + os.sep
        self.outside: dict[str, None] = {}  # new files that were written elsewhere
        self._copies: dict[str, tuple[int, int]] = {}

    def here(self, path: Path) -> Path:
        """Where a file of the originals is in this folder; itself where it is in none."""
        for original, image in self.images.items():
            if path.is_relative_to(original):
                return image / path.relative_to(original)
        return path

    def there(self, text: str) -> str:
        """A text that names paths of this folder, with those of the originals."""
        for original, image in self.images.items():
            text = text.replace(str(image), str(original))
        return text

    def renew(self) -> None:
        """Make the images as the originals are now; what an earlier run has written is gone."""
        with _quietly():
            shutil.rmtree(self.root, ignore_errors=True)
            self._copies.clear()
            left = [MOST, MOST_COPIED]  # entries, bytes
            for original, image in self.images.items():
                image.parent.mkdir(parents=True)
                self._image(original, image, left)
                self._surround(original, image)

    def put(self, path: Path, text: str) -> None:
        """A source of this run."""
        with _quietly():
            path.unlink(missing_ok=True)
            path.write_text(text)
            self._copies[str(path)] = _mark(path)

    def _surround(self, original: Path, image: Path) -> None:
        """What is found by `..` is linked."""
        for folder, mine in zip(original.parents, image.parents, strict=False):
            with suppress(OSError):
                entries = list(os.scandir(folder))
                for entry in entries if len(entries) <= MOST_BESIDE else ():
                    if not os.path.lexists(mine / entry.name) and not self.root.is_relative_to(entry.path):
                        (mine / entry.name).symlink_to(entry.path)

    def _image(self, original: Path, image: Path, left: list[int]) -> None:
        try:
            entries = list(os.scandir(original))
        except OSError:
            entries = []
        left[0] -= len(entries)
        is_root = original in self.images
        if not is_root and (len(entries) > MOST_IN_A_FOLDER or left[0] < 0 or any(e.name == "pyvenv.cfg" for e in entries)):
            image.symlink_to(original, target_is_directory=True)
            return
        image.mkdir()
        for entry in entries:
            mine = image / entry.name
            with suppress(OSError):
                if self.root.is_relative_to(entry.path):
                    continue
                if entry.is_dir(follow_symlinks=False) and not (entry.name.startswith(".") or entry.name in APART):
                    self._image(Path(entry.path), mine, left)
                elif entry.is_file() and (size := entry.stat().st_size) <= min(LARGEST_COPY, left[1]):
                    left[1] -= size
                    shutil.copy2(entry.path, mine)
                    self._copies[str(mine)] = _mark(mine)
                else:
                    mine.symlink_to(entry.path)

    def written(self) -> list[str]:
        """Files that are new here or have changed, as the code named them: relative to the first folder."""
        found = []
        with _quietly():
            for k, image in enumerate(self.images.values()):
                for folder, _, names in os.walk(self.root / str(k)):
                    paths = [Path(folder, name) for name in names]
                    mine = [path for path in paths if not path.is_symlink() and path.is_file()]
                    found += [os.path.relpath(path, image) for path in mine if self._copies.get(str(path)) != _mark(path)]
        return sorted(found)

    # -- what is about to be written ----------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, what is about to be written becomes a copy first; see the class."""
        global _active, _hooked
        if not _hooked:
            sys.addaudithook(_hook)
            _hooked = True
        before, _active = _active, self
        try:
            with replaced({module: {name: _telling for name in names} for module, names in WRITERS.items()}):
                yield
        finally:
            _active = before

    def about_to(self, deed: Deed, path: str) -> None:
        """Before something is done to `path`: what this folder links to is made its own, and nothing of others is changed."""
        absolute = Path(os.path.abspath(path))
        if absolute.is_relative_to(self.root):
            self._own(absolute, deed)
            return
        real = os.path.realpath(absolute)
        inside = next((Path(real).relative_to(o) for o in self.images if Path(real).is_relative_to(o)), None)
        is_passing = inside is None and real.startswith((*DEVICES, self.passing, sys.prefix + os.sep))
        if is_passing or any(part.startswith(".") for part in (inside or Path(real)).parts):
            return  # devices, temporary folders, caches
        if os.path.isfile(real) and str(absolute) not in self.outside:
            raise PermissionError(
                f"{path} was there before, and an audit changes no files: name a place inside the working folder, or use "
                "--in-place"
            )
        if not os.path.exists(real):
            self.outside[str(absolute)] = None

    def _own(self, path: Path, deed: Deed) -> None:
        for part in (*reversed(path.parents), path):
            if not (part.is_relative_to(self.root) and part.is_symlink()) or (part == path and deed == "move"):
                continue
            target = Path(os.path.realpath(part))
            if target.is_dir():
                part.unlink()
                part.mkdir()
                for entry in os.scandir(target):
                    (part / entry.name).symlink_to(entry.path)
            elif part == path:
                part.unlink()
                if deed == "change" and target.is_file():
                    shutil.copy2(target, part)


def _mark(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns


@contextmanager
def _quietly() -> Iterator[None]:
    """What is done inside is our own."""
    before, _busy.now = getattr(_busy, "now", False), True
    try:
        yield
    finally:
        _busy.now = before


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _active is None or getattr(_busy, "now", False) or event not in DEEDS:
        return
    for place, deed, folder in DEEDS[event]:
        if event == "open" and isinstance(args[2], int):
            if not args[2] & WRITES:
                continue
            deed = "replace" if args[2] & os.O_TRUNC else "change"
        if folder is None or len(args) <= folder or args[folder] in (-1, None):  # else relative to an open folder
            _tell(deed, args[place])


def _tell(deed: Deed, path: Any) -> None:
    if _active is not None and isinstance(path, (str, bytes, os.PathLike)):
        with _quietly():
            _active.about_to(deed, os.fsdecode(path))


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes to a path, its second argument, by code of its own."""

    @wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        _tell("replace", next(iter(args[1:]), kwargs.get("f", kwargs.get("filename"))))
        return original(*args, **kwargs)

    return write


def told(names: Sequence[str]) -> str:
    """Files in one line.

    >>> told([])
    'nothing'
    """
    listed = ", ".join(names[:TOLD]) or "nothing"
    return listed + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
