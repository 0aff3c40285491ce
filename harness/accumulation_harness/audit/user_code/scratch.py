"""A scratch folder in which somebody's code runs: it finds what is in its own folder, and what it writes stays here."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from accumulation_harness.audit.user_code.imports import replaced
from accumulation_harness.observe.patches import Wrap

LARGEST_COPY = 1 << 20  # bytes of a file; larger ones are linked
MOST_COPIED = 1 << 26  # bytes in all
MOST_IN_A_FOLDER = 500  # entries; a folder of more holds data, and is linked as a whole
MOST_BESIDE = 100  # entries beside the folder, and beside each that it is in
MOST = 5_000  # entries in all that are looked at
APART = ("__pycache__", "node_modules", "site-packages", "wandb", "mlruns")  # folders that nobody needs one by one
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = ("/dev/", "/proc/", "/sys/")
TOLD = 5  # files that are listed

SOURCES = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".env", ".sh")
Mark = tuple[int, int, int] | None  # inode, bytes, time of the last change; None of a folder
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

    Later runs find them as the first one did. In small sources, paths of the folders become those of their images.
    Files outside that were there before are not changed: what would do so raises PermissionError. New ones are removed.
    Python's own calls are seen, and `torch.save`; what writes by code of its own into a large file that was there is not.
    """

    def __init__(self, originals: Sequence[Path]) -> None:
        """`originals`: absolute; one that is inside another is part of its image."""
        roots = [path for path in dict.fromkeys(originals) if not any(path != o and path.is_relative_to(o) for o in originals)]
        self.root = Path(os.path.realpath(tempfile.mkdtemp(prefix="scratch-")))
        weakref.finalize(self, shutil.rmtree, self.root, True)
        self.images = {path: self.root / str(k) / path.relative_to(path.anchor) for k, path in enumerate(roots)}
        self.passing = os.path.realpath(tempfile.gettempdir()) + os.sep
        self.outside: dict[str, None] = {}  # new files that were written elsewhere, and are gone
        self._new: dict[str, None] = {}  # those of the run
        self._marks: dict[str, Mark] = {}  # path -> how it was made
        named = sorted(map(str, self.images), key=len, reverse=True)
        self._named = re.compile(
            "|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])" for name in named if len(name) > 1) or r"(?!)"
        )

    def here(self, path: Path) -> Path:
        """Where a file of the originals is in this folder; itself where it is in none."""
        for original, image in self.images.items():
            if path.is_relative_to(original):
                return image / path.relative_to(original)
        return path

    def named_here(self, text: str) -> str:
        """A text that names paths of the originals, with those of this folder."""
        return self._named.sub(lambda found: str(self.images[Path(found[0])]), text)

    def there(self, text: str) -> str:
        """A text that names paths of this folder, with those of the originals."""
        for original, image in self.images.items():
            text = text.replace(str(image), str(original))
        return text

    def renew(self) -> None:
        """Make the images, or what an earlier run has changed of them; what it has written is gone."""
        with _quietly():
            now = self._marks_now()
            for path in sorted(now, reverse=True):
                if now[path] != self._marks.get(path, ()):
                    (os.rmdir if now[path] is None else os.unlink)(path)
            left = [MOST, MOST_COPIED]  # entries, bytes
            for original, image in self.images.items():
                image.parent.mkdir(parents=True, exist_ok=True)
                self._image(original, image, left)
                self._surround(original, image)
            self._marks |= self._marks_now()

    def put(self, path: Path, text: str) -> None:
        """A source of this run."""
        with _quietly():
            self._own(path, "replace")
            path.unlink(missing_ok=True)
            path.write_text(self.named_here(text))
            self._marks[str(path)] = _mark(path.stat())

    def _surround(self, original: Path, image: Path) -> None:
        """What is found by `..` is linked."""
        for folder, mine in zip(original.parents, image.parents, strict=False):
            with suppress(OSError):
                entries = list(os.scandir(folder))
                for entry in entries if len(entries) <= MOST_BESIDE else ():
                    self._link(f"{mine}/{entry.name}", entry.path)

    def _image(self, original: Path | str, image: Path | str, left: list[int]) -> None:
        try:
            entries = list(os.scandir(original))
        except OSError:
            entries = []
        left[0] -= len(entries)
        is_root = original in self.images
        if not is_root and (len(entries) > MOST_IN_A_FOLDER or left[0] < 0 or any(e.name == "pyvenv.cfg" for e in entries)):
            self._link(image, original)
            return
        os.makedirs(image, exist_ok=True)
        for entry in entries:
            mine = f"{image}/{entry.name}"
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and not (entry.name.startswith(".") or entry.name in APART):
                    if not self.root.is_relative_to(entry.path):
                        self._image(entry.path, mine, left)
                elif entry.is_file() and (size := entry.stat().st_size) <= min(LARGEST_COPY, left[1]):
                    left[1] -= size
                    self._copy(mine, entry.path)
                else:
                    self._link(mine, entry.path)

    def _link(self, path: Path | str, source: Path | str) -> None:
        """Unless something is there, or it holds this folder."""
        if not os.path.lexists(path) and not self.root.is_relative_to(source):
            os.symlink(source, path)

    def _copy(self, path: str, source: str) -> None:
        """Unless it is there."""
        if os.path.lexists(path):
            return
        with open(source, "rb") as old, open(path, "wb") as new:
            content, seen = old.read(), os.fstat(old.fileno())
            if path.endswith(SOURCES):
                content = self.named_here(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
            new.write(content)
            os.fchmod(new.fileno(), seen.st_mode & 0o777)
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))

    def _marks_now(self) -> dict[str, Mark]:
        """Of all that is in this folder."""
        found: dict[str, Mark] = {}
        folders = [folder for k, _ in enumerate(self.images) if os.path.isdir(folder := f"{self.root}/{k}")]
        while folders:
            for entry in os.scandir(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    found[entry.path] = None
                    folders.append(entry.path)
                else:
                    found[entry.path] = _mark(entry.stat(follow_symlinks=False))
        return found

    def written(self) -> list[str]:
        """Files that are new here or have changed, as the code named them: relative to the first folder."""
        with _quietly():
            now = self._marks_now()
            changed = [path for path in now if now[path] is not None and now[path] != self._marks.get(path)]
            image = next(iter(self.images.values()))
            return sorted(os.path.relpath(path, image) for path in changed if not os.path.islink(path))

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
            for path in reversed(self._new):
                with suppress(OSError):
                    (os.rmdir if os.path.isdir(path) else os.unlink)(path)
            self._new.clear()

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
        if os.path.isfile(real) and real not in self._new:
            raise PermissionError(
                f"{path} was there before, and an audit changes no files: name a place inside the working folder, or use "
                "--in-place"
            )
        if not os.path.exists(real):
            self._new[real] = self.outside[str(absolute)] = None

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


def _mark(seen: os.stat_result) -> Mark:
    return seen.st_ino, seen.st_size, seen.st_ctime_ns


@contextmanager
def _quietly() -> Iterator[None]:
    """What is done inside is our own."""
    before, _busy.now = getattr(_busy, "now", False), True
    try:
        yield
    finally:
        _busy.now = before


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _active is None or getattr(_busy, "now", False):
        return
    if event == "socket.bind" and args[0].family != getattr(socket, "AF_UNIX", None):
        with suppress(OSError, AttributeError):  # a server of the run before may still listen there
            args[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if event not in DEEDS:
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


def _telling(original: Wrap, *args: Any, **kwargs: Any) -> Any:
    """Of a function that writes to a path, its second argument, by code of its own."""
    _tell("replace", next(iter(args[1:]), kwargs.get("f", kwargs.get("filename"))))
    return original(*args, **kwargs)


def told(names: Sequence[str]) -> str:
    """List files in one line.

    >>> told([])
    'nothing'

    Args:
        names: Their paths.

    Returns:
        The first `TOLD` of them, and how many more there are.
    """
    listed = ", ".join(names[:TOLD]) or "nothing"
    return listed + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
