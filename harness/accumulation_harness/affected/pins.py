"""Which releases a project installs, read from its requirements, its lock files or its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from accumulation_harness.system.files import read_file

NAMES = (
    "*requirements*.txt", "*requirements*.in", "requirements/*.txt", "requirements/*.in", "constraints*.txt", "uv.lock",
    "poetry.lock", "pdm.lock", "pylock*.toml", "Pipfile.lock", "pixi.lock", "conda-lock.yml", "environment*.yml",
    "environment*.yaml", "pyproject.toml",
)  # fmt: skip
ARTEFACT = re.compile(
    r"/(?P<name>[\w.-]+?)-(?P<version>\d[^-/]*)(?:-[^-/]+\.(?:conda|tar\.bz2)|(?:-[^/]*)?\.whl|\.(?:tar\.gz|zip))\b"
)
PASSING = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)(?:\[[\w, -]*\])?==(\d[\w.+!]*)")
TAG = re.compile(r"@v?(\d+(?:\.\w+)+)(?:$|[#&])")
SOURCE = re.compile(r"git\+\S*?/(?P<name>[\w.-]+?)(?:\.git)?(?:@[^#\s]*)?(?:#.*)?$")
CONDA = re.compile(r"(?:[\w./-]+::)?([\w.-]+) *=(?!=) *([\w.*+!]+)(=[\w.*]+)?$")
CARET = re.compile(r"[\^~] *(\d+(?:\.\d+)*)")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One package of a project: the release that it installs, or those that it admits."""

    package: str  # as PyPI normalises it
    version: Version | None
    admitted: SpecifierSet = field(default_factory=SpecifierSet)
    where: str

    def __str__(self) -> str:
        return f"{self.package} {self.version or self.admitted or '(any release)'} ({self.where})"


def installed() -> Iterator[Pin]:
    """Yield what is installed beside this command.

    Yields:
        Name and exact version of each package.
    """
    for found in metadata.distributions():
        yield from _exact(found.name, found.version, "this environment")


def of(path: Path) -> Iterator[Pin]:
    """Yield what a file says, or the files of a folder whose names are known; each release once, where a file has it first.

    Args:
        path: A requirements file, a lock file, a `pyproject.toml`, or a folder.

    Yields:
        What is pinned.

    Raises:
        ValueError: Nothing can be read.
    """
    if path.is_dir():
        known = sorted({file for name in NAMES for file in path.glob(name) if file.is_file()})
        if not known:
            raise ValueError(f"{path}: expected one of {', '.join(NAMES)} in it")
        for file in known:
            yield from of(file)
        return
    try:
        text = read_file(path).decode("utf-8-sig")
        if path.name == "Pipfile.lock":
            found = _pipfile(json.loads(text), str(path))
        elif path.suffix in (".yml", ".yaml") or path.name == "pixi.lock":
            found = _yaml(text.splitlines(), str(path), locked="lock" in path.name)
        elif path.suffix in (".lock", ".toml"):
            found = _tables(_toml(text), str(path))
        elif path.suffix in (".txt", ".in"):
            found = _requirements(path, set())
        else:  # a Dockerfile, a script, a README, a notebook: what it pins in passing
            found = _in_passing(text.splitlines(), str(path))
        first: dict[Pin, Pin] = {}  # conda-lock has a release twice for each platform
        yield from dict.fromkeys(first.setdefault(replace(pin, where=""), pin) for pin in found)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected requirements or a lock file, got {type(error).__name__}: {error}") from error


def _in_passing(lines: Iterable[str], where: str) -> Iterator[Pin]:
    for number, line in enumerate(lines, 1):
        for found in PASSING.finditer(line):
            yield from _exact(found[1], found[2].rstrip("."), f"{where}:{number}")


def _exact(name: str | None, version: str | None, where: str) -> Iterator[Pin]:
    try:
        yield Pin(package=canonicalize_name(name or ""), version=Version(version or ""), where=where)
    except InvalidVersion:  # a local package, or one of another manager
        return


def _ranged(name: str, specifiers: str, where: str) -> Iterator[Pin]:
    """One release where the specifiers name one, else all that they admit."""
    try:
        admitted = SpecifierSet(specifiers)
    except InvalidSpecifier:
        return
    exact = [one.version for one in admitted if one.operator in ("==", "===") and not one.version.endswith(".*")]
    if exact:
        yield from _exact(name, exact[0], where)
    else:
        yield Pin(package=canonicalize_name(name), version=None, admitted=admitted, where=where)


def _requirement(line: str, where: str) -> Iterator[Pin]:
    try:
        asked = Requirement(line)
    except InvalidRequirement:
        name, url, specifiers = None, line, ""
    else:
        name, url, specifiers = asked.name, asked.url or "", str(asked.specifier)
    if file := ARTEFACT.search(url):
        yield from _exact(name or file["name"], file["version"], where)
        return
    if source := SOURCE.search(url):
        name = name or source["name"]
    if source and (tag := TAG.search(url)):
        yield from _exact(name, tag[1], where)
    elif name:  # a branch or a commit may be any release
        yield from _ranged(name, specifiers, where)


def _requirements(path: Path, read: set[Path]) -> Iterator[Pin]:
    """As pip reads them: joined lines, comments, options after a requirement, files that are included."""
    read.add(path.resolve())
    text = read_file(path).decode("utf-8-sig")
    number = 1
    for line in re.sub(r"\\\r?\n", "\\\\\f", text).split("\n"):
        joined, here = line.replace("\\\f", " "), f"{path}:{number}"
        number += 1 + line.count("\f")
        asked = re.sub(r"(^|\s)#.*", "", joined).partition(" --")[0].strip()
        if included := re.match(r"(?:-[rc]|--requirement|--constraint)[ =]*(\S+)", joined.strip()):
            other = path.parent / included[1]
            if other.resolve() not in read and "://" not in included[1]:
                yield from _requirements(other, read)
        elif asked.startswith(("-e ", "--editable ")) or (asked and not asked.startswith("-")):
            yield from _requirement(re.sub(r"^(-e|--editable) ", "", asked), here)


def _toml(text: str) -> Mapping[str, Any]:
    try:
        import tomllib
    except ImportError as error:
        raise ValueError("TOML is read by Python 3.11 and newer") from error
    return tomllib.loads(text)


def _tables(read: Mapping[str, Any], where: str) -> Iterator[Pin]:
    """Of the lock files of uv, Poetry, PDM and pip (PEP 751), and of a pyproject.toml."""
    for table in (*read.get("package", ()), *read.get("packages", ())):
        yield from _exact(table.get("name"), table.get("version"), where)
    project, poetry = read.get("project", {}), read.get("tool", {}).get("poetry", {})
    groups = (*project.get("optional-dependencies", {}).values(), *read.get("dependency-groups", {}).values())
    for line in (*project.get("dependencies", ()), *(one for group in groups for one in group)):
        if isinstance(line, str):  # else a group that includes another
            yield from _requirement(line, where)
    for table in (poetry, *poetry.get("group", {}).values()):
        for name, asked in table.get("dependencies", {}).items():
            yield from _ranged(
                name, _poetry(asked["version"] if isinstance(asked, dict) and "version" in asked else asked), where
            )


def _poetry(asked: object) -> str:
    """Specifiers from Poetry's: a caret and a tilde set the next release that differs too much, a bare version is exact."""
    if not isinstance(asked, str):
        return "no version"
    if (ranged := CARET.match(asked)) is None:
        return f"=={asked}" if asked[:1].isdigit() else asked.replace("*", "") if asked == "*" else asked
    parts = [int(part) for part in ranged[1].split(".")]
    kept = 2 if asked.startswith("~") and len(parts) > 1 else next((place for place, part in enumerate(parts, 1) if part), 1)
    upper = [*parts[: kept - 1], parts[kept - 1] + 1]
    return f">={ranged[1]},<{'.'.join(map(str, upper))}"


def _pipfile(read: Mapping[str, Any], where: str) -> Iterator[Pin]:
    for section in ("default", "develop"):
        for name, table in read.get(section, {}).items():
            yield from _ranged(name, table.get("version", "no version"), where)


def _yaml(lines: Iterable[str], where: str, *, locked: bool) -> Iterator[Pin]:
    """Conda environments and the lock files of conda-lock and pixi, line by line, so that no reader of YAML is needed."""
    name = None
    for number, line in enumerate(lines, 1):
        bare, here = re.sub(r"(^|\s)#.*", "", line).strip().strip("'\""), f"{where}:{number}"
        key, is_key, value = bare.removeprefix("- ").partition(": ")
        if is_key and "/" in value and (file := ARTEFACT.search(value)):
            yield from _exact(file["name"], file["version"], here)
        elif is_key and key == "name":
            name = value.strip("'\"")
        elif is_key and key == "version" and name:
            yield from _exact(name, value.strip("'\""), here)
            name = None
        elif bare.startswith("- ") and not is_key and not locked:  # in a lock file this is what a package of it asks for
            asked = bare[2:].strip().strip("'\"")
            if conda := CONDA.fullmatch(asked):
                whole = conda[3] or conda[2].count(".") > 1
                yield from _ranged(conda[1], f"=={conda[2]}" if whole or conda[2].endswith("*") else f"=={conda[2]}.*", here)
            else:
                yield from _requirement(asked.rpartition("::")[2], here)
