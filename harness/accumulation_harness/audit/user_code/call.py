"""One call of somebody's code, as if a process of its own had been started for it."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from accumulation_harness.audit.observe.frames import INSTALLED
from accumulation_harness.audit.observe.runs import described
from accumulation_harness.audit.request import SIZES, takes_sizes
from accumulation_harness.audit.user_code.asking import advised, asking
from accumulation_harness.audit.user_code.process import of_its_own
from accumulation_harness.audit.user_code.scratch import Scratch, told
from accumulation_harness.audit.user_code.settings import Settings, edited, filled, numbers_of, source_of
from accumulation_harness.audit.user_code.target import NOTEBOOK, Target, module_of
from accumulation_harness.audit.user_code.trackers import OFF, trackers_off
from accumulation_harness.config.targets import import_file

ANEW = (
    "hydra",
    "absl",
    "ml_collections",
    "gin",
    "sacred",
)  # libraries that keep what an earlier run has told them: each run imports its own
ENDED_WELL = (None, 0, "os._exit(0)")  # what a SystemExit says
LAST_WORDS = 5  # lines of its standard error that are kept
SCRIPT = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in SIZES])


class UserCode:
    """A function of (batch_size, accumulation_steps) that starts somebody's code anew on every call.

    Every call has fresh modules of the user's own, the environment, folder and command line that the settings say, and a scratch
    folder unless `in_place`. Trackers are off, nobody answers what it asks, and spawned workers of loaders are forked.
    """

    def __init__(self, target: Target, settings: Settings, *, in_place: bool = False) -> None:
        """Raises ValueError for what is not there, or cannot be imported or be told the numbers."""
        self.target, self.settings = target, settings
        source = target.file()
        self.root, self.dotted = module_of(source)
        self.folder = Path.cwd()
        originals = [self.folder] if INSTALLED.search(str(source)) else [self.folder, self.root]
        if in_place and (settings.edits or source.suffix == NOTEBOOK):
            raise ValueError("expected no --in-place with --set-file or a notebook: they need files of their own")
        self.scratch = None if in_place else Scratch(originals)
        self.source = source
        self.file = self._here(source).with_suffix(".py")  # where it runs
        self.__name__ = target.name or source.stem
        self.is_rank = False
        self.trackers: dict[str, None] = {}  # calls that were kept from starting something
        self.written: dict[str, None] = {}
        self.calls = 0
        self.last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.__signature__ = SCRIPT
        self._find()

    def _find(self) -> None:
        """Ask a function for its parameters. Raises ValueError where it is not there, or the two numbers have no way in."""
        for edit in self.settings.edits:
            edited(edit.file, source_of(edit.file), edit.key, edit.text)
        if not self.target.name:
            if not self.settings.texts:
                raise ValueError(asking(self.target, self.source, self.settings.rest))
            return
        try:
            with self._started([]):
                function = self._function()
        except (Exception, SystemExit, GeneratorExit) as error:
            said = self.there(described(error))
            raise ValueError(f"expected a file that can be imported, got {self.target.where}: {said}") from error
        if function is None:
            raise ValueError(f"expected a function {self.target.name} in {self.target.where}, found none")
        self.__signature__ = self._signature(function)

    def _here(self, path: Path) -> Path:
        return path if self.scratch is None else self.scratch.here(path)

    def __call__(self, batch_size: int, accumulation_steps: int, **options: Any) -> Any:
        """What the code gives back; a script that leaves with exit code 0 has ended well."""
        numbers = numbers_of(batch_size, accumulation_steps)
        self.calls += 1
        with self._started(self.settings.arguments(numbers), numbers):
            try:
                if not self.target.name:
                    return self._run()
                function = self._function()
                assert function is not None
                if self.settings.texts and not self._takes_sizes(inspect.signature(function)):
                    return function()
                named = all(name in self.__signature__.parameters for name in SIZES)
                sizes = {name: numbers[name] for name in SIZES}
                return function(**sizes, **options) if named else function(*sizes.values(), **options)
            except SystemExit as end:
                if end.code not in ENDED_WELL or (self.target.name and not self.settings.texts):
                    said = " ".join(" ".join(self.last_words).split())
                    raise SystemExit(f"{end.code}; its last output was: {said}" if said else end.code) from end
                return None

    # -- what is run -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """As `python FILE` does, or `python -m` what is named as a module or imports relatively."""
        if self.target.is_file and "." not in self.dotted:
            sys.path.insert(0, str(self.file.parent))
            runpy.run_path(str(self.file), run_name="__main__")
        else:
            runpy.run_module(self._module_name, run_name="__main__", alter_sys=True)

    @property
    def _module_name(self) -> str:
        return self.dotted if self.target.is_file else self.target.where

    def _function(self) -> Callable[..., Any] | None:
        """Imported now; None where it is not there."""
        owner: Any = None
        found: Any = self._imported()
        for part in self.target.name.split("."):
            owner, found = found, getattr(found, part, None)
        if not callable(found):
            return None
        if inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, found.__name__, None), FunctionType):
            return _method(owner, found.__name__)
        function: Callable[..., Any] = found
        return function

    def _imported(self) -> Any:
        if self.target.is_file and "." not in self.dotted:
            sys.path.insert(0, str(self.file.parent))
            return import_file(self.file, f"audited_{self.file.stem}")
        return importlib.import_module(self._module_name)

    def _signature(self, function: Callable[..., Any]) -> inspect.Signature:
        given = inspect.signature(function)
        if self.settings.texts and not self._takes_sizes(given):
            return SCRIPT
        if not takes_sizes(given):
            raise ValueError(asking(self.target, self.source))
        bare = [
            p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None) for p in given.parameters.values()
        ]
        return inspect.Signature(bare)  # which can be sent to ranks

    def _takes_sizes(self, signature: inspect.Signature) -> bool:
        """Whether the function itself is given the two numbers."""
        required = [p for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
        return any(p.kind is not p.VAR_KEYWORD for p in required)

    # -- as if a process had been started ----------------------------------------------------------------------------------

    @contextmanager
    def _started(self, arguments: list[str], numbers: Mapping[str, int] | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            scratch = self.scratch
            named = str if scratch is None else scratch.named_here
            before = set(sys.modules)
            if scratch is not None:
                if not self.is_rank:
                    stack.enter_context(self._renewed(scratch, numbers or {}))
                stack.enter_context(scratch.watched())
            stack.callback(self._forget, before)
            stack.enter_context(of_its_own(self._is_own))
            self.last_words.clear()
            sys.stdout, sys.stderr = _Told(self, None), _Told(self, self.last_words)
            stack.enter_context(trackers_off(lambda said: self.trackers.update({said: None})))
            environment = {name: named(filled(text, numbers)) for name, text in self.settings.environment if numbers}
            os.environ |= {**OFF, "HYDRA_FULL_ERROR": "1", **environment}
            os.chdir(self._here(self.folder))
            sys.argv = [str(self.file) if self.target.is_file else self.target.where, *map(named, arguments)]
            images = [str(self._here(Path(path))) if path else "" for path in sys.path]
            sys.path[:] = [str(self._here(self.root)), *images, str(self._here(self.folder))]
            sys.dont_write_bytecode = True  # a file that has been edited may have the time of the one before
            importlib.invalidate_caches()
            yield

    def __getstate__(self) -> dict[str, Any]:
        """What a rank of several is sent: the folder is prepared where it comes from, for all of them."""
        return {**vars(self), "is_rank": True}

    def prepared(self, batch_size: int, accumulation_steps: int) -> AbstractContextManager[None]:
        """Inside, the scratch folder of one run is there for its ranks."""
        return nullcontext() if self.scratch is None else self._renewed(self.scratch, numbers_of(batch_size, accumulation_steps))

    @contextmanager
    def _renewed(self, scratch: Scratch, numbers: Mapping[str, int]) -> Iterator[None]:
        """As the user's folder is, the notebook as a script, and files with the values of this run."""
        scratch.renew()
        texts: dict[Path, str] = {}
        if self.source.suffix == NOTEBOOK:
            texts[self.source] = source_of(self.source, self.target.name)
        for edit in self.settings.edits if numbers else ():
            text = texts.get(edit.file) or source_of(edit.file)
            texts[edit.file] = edited(edit.file, text, edit.key, filled(edit.text, numbers))
        for path, text in texts.items():
            mine = scratch.here(path)
            scratch.put(mine.with_suffix(".py") if path.suffix == NOTEBOOK else mine, text)
        try:
            yield
        finally:
            self.written |= dict.fromkeys(scratch.written())

    def _forget(self, before: set[str]) -> None:
        """Modules of the user's own, and of libraries that keep what a run has told them, are imported anew by the next run."""
        ours = __name__.partition(".")[0]
        for name, module in [*sys.modules.items()]:
            library = name.partition(".")[0]
            if name not in before and library != ours and (library in ANEW or self._is_own(module)):
                del sys.modules[name]
        gc.collect()

    def _is_own(self, module: ModuleType) -> bool:
        """Whether it comes from the folders in which the code runs, and from no installed package in them."""
        roots = [str(self._here(self.root)), str(self._here(self.folder))]
        known = vars(module)  # nothing lazy is woken
        places = [str(known.get("__file__") or "")] if known.get("__file__") else getattr(known.get("__path__"), "_path", ())
        is_inside = any(place.startswith(root + os.sep) for place in places for root in roots)
        return is_inside and not any(map(INSTALLED.search, places))

    def there(self, text: str) -> str:
        """A text with the names that files have where their owner has them."""
        if self.source.suffix == NOTEBOOK:
            text = text.replace(str(self.file), str(self.source))
        return text if self.scratch is None else self.scratch.there(text)

    @property
    def advice(self) -> list[str]:
        """How a script that took no step seems to be told the two numbers, in a line."""
        options = "" if self.target.name else advised(self.source, self.settings.rest)
        return [f"as far as its text shows, {self.target.where} gets the two numbers by {options}"] if options else []

    @property
    def remarks(self) -> list[str]:
        """What is to be said of its surroundings, in lines."""
        said = []
        if self.written:
            said.append(f"a run writes {told(list(self.written))}: into a scratch folder, which is gone")
        if self.scratch is not None and self.scratch.outside:
            said.append(f"a run writes outside of its working folder: {told(list(self.scratch.outside))}: removed again")
        if self.trackers:
            said.append(f"{', '.join(self.trackers)} started nothing: trackers are off during an audit")
        return said


def load(text: str, settings: Settings | None = None, *, in_place: bool = False) -> UserCode:
    """The code that a text names.

    Args:
        text: `FILE.py:FUNCTION`, `package.module:FUNCTION` or a script.
        settings: How a script is told the two numbers.
        in_place: Whether it runs in its own folder instead of a copy.

    Returns:
        What calls it.

    Raises:
        ValueError: It cannot be found or imported; the message is one line.
    """
    return UserCode(Target.of(text), settings or Settings(), in_place=in_place)


class _Told:
    """A text stream whose lines are kept, and in the first run handed to standard error: later ones print the same."""

    def __init__(self, code: UserCode, kept: deque[str] | None) -> None:
        self.code, self.kept, self.stream = code, kept, sys.__stderr__

    def write(self, text: str) -> int:
        if self.kept is not None:
            self.kept.extend(line for line in text.splitlines() if line.strip())
        if self.code.calls == 1 and self.stream is not None:
            self.stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _method(owner: type, name: str) -> Callable[..., Any]:
    """A method of an object that is made for the call, with the two numbers where its class takes them."""
    if all(size in inspect.signature(owner).parameters for size in SIZES):

        def made_with(batch_size: int, accumulation_steps: int) -> Any:
            return getattr(owner(batch_size=batch_size, accumulation_steps=accumulation_steps), name)()

        return made_with
    method: Callable[..., Any] = getattr(owner(), name)
    return method
