"""The fence around an observer: all that it does for a run passes here, and what fails inside ends it, never the run."""

from __future__ import annotations

import functools
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy
import torch

from accumulation_harness.observe import patches
from accumulation_harness.observe.patches import Patches, Place, Wrap

P = ParamSpec("P")
R = TypeVar("R")
Seeing = Generator[None, Any, None]  # of one call, which is made where it yields, and whose result is sent
See = Callable[..., Seeing]  # is called with the arguments of a call
PACKAGE = Path(__file__).parents[1]
LIBRARIES = (torch.__path__[0], numpy.__path__[0])
STDLIB = sysconfig.get_paths()["stdlib"]
PASSED_THROUGH = (__file__, patches.__file__)  # the user's calls go through these frames


class Fence:
    """What one observer has replaced and hooked, whether it goes on, and why it ended before it was told to."""

    def __init__(self, ended: Callable[[], object], name: str, *, own_thread: bool = False) -> None:
        """`ended` is called when something has failed; `name`: what has ended then. `own_thread`: as `Patches` has it."""
        self.patches, self._ended, self.name = Patches(own_thread=own_thread), ended, name
        self.is_open = False
        self.paused = False  # what the observer itself makes the run's code do is not to be seen
        self.reason = ""
        self.windows = 0  # that have ended
        self.hooks_under_way = 0

    def open(self) -> None:
        """The observer begins."""
        self.is_open = True

    def close(self) -> None:
        """It has ended: all hooks are deaf from now on, and everything is put back."""
        self.is_open = False
        self.patches.leave()
        if not self.hooks_under_way:  # torch may be about to call the next one
            self.patches.restore()

    def run(self, call: Callable[..., R], *args: Any, **kwargs: Any) -> R | None:
        """The result; None where it fails."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Something of ours has failed: the observer ends, and the run goes on."""
        self.close()
        if not self.reason:
            self.reason = f"{self.name} ended at window {self.windows + 1}: {told(error)}"
            with suppress(Exception):  # the stream that it is told to may be what has failed
                self._ended()

    def hook(self, call: Callable[..., object]) -> Hook:
        """A hook that is deaf when the observer has ended."""
        return Hook(self, call)

    def hooked(self, register: Callable[..., Any], call: Callable[..., object], **options: Any) -> Any:
        """Register a hook that is removed when the observer ends, and return its handle."""
        handle = register(self.hook(call), **options)
        self.patches.removing(handle)
        return handle

    @property
    def is_deaf(self) -> bool:
        """Whether nothing is to be seen now: it has ended, is not to look, or a compiler traces the run alone."""
        return not self.is_open or self.paused or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None

    def replace(
        self, sees: Mapping[Place, See], changes: Mapping[Place, Wrap] | None = None, namespaces: Iterable[dict[str, Any]] = ()
    ) -> None:
        """See the calls of these functions and methods, before and after; and change those of others, compiled ones as well.

        A change is `wrap(original, *args, **kwargs)`, which may call the original otherwise.
        """
        seen = {place: self._wrap(see) for place, see in sees.items()}
        changed = {place: self._around(wrap) for place, wrap in (changes or {}).items()}
        self.patches.replace({**seen, **changed, (torch.jit, "script"): _scripted}, namespaces)

    def _around(self, wrap: Wrap) -> Wrap:
        def wrapped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return wrap(original, *args, **kwargs)
            if not self.is_open:
                return original(*args, **kwargs)
            raised: list[BaseException] = []

            def called(*args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                except BaseException as error:
                    raised.append(error)
                    raise

            try:
                return wrap(called, *args, **kwargs)
            except Exception as error:
                if error in raised:
                    raise
                self.fail(error)
                return original(*args, **kwargs)

        return wrapped

    def _wrap(self, see: See) -> Wrap:
        def wrapped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.is_deaf:
                return original(*args, **kwargs)
            seeing = self.run(_begun, see, *args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if seeing is not None and self.is_open:
                    self.run(seeing.close)
                raise
            if seeing is not None and self.is_open:
                self.run(_ended, seeing, result)
            return result

        return wrapped


class Hook:
    """A hook; what is copied or stored of it does nothing, and needs no package of ours."""

    __torch_unserializable__ = True  # of a tensor: torch need not warn that it is not stored

    def __init__(self, fence: Fence, call: Callable[..., object]) -> None:
        self.fence, self.call = fence, call

    def __call__(self, *args: Any) -> None:
        """Hand on what the hook is told, but for tensors that have no numbers yet."""
        fence = self.fence
        if fence.is_deaf:
            return
        fence.hooks_under_way += 1
        try:
            fence.run(self.call, *args)
        finally:
            fence.hooks_under_way -= 1

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, and does nothing


def _scripted(original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a function or module as it is without observers: their hooks and wrappers are no TorchScript."""
    modules = made.modules() if isinstance(made, torch.nn.Module) else ()
    tables = [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]
    before = [dict(table) for table in tables]
    with patches.lifted():
        try:
            for table in tables:
                for key in [key for key, hook in table.items() if _is_of_an_observer(hook)]:
                    del table[key]
            return original(made, *args, **kwargs)
        finally:
            for table, hooks in zip(tables, before, strict=True):
                table.clear()
                table.update(hooks)


def _is_of_an_observer(hook: Any) -> bool:
    """Whether it is a hook of ours, or what a copy of a module has in its place."""
    return type(hook) is Hook or isinstance(getattr(hook, "__self__", None), nullcontext)


def is_the_runs(hook: Any) -> bool:
    """Tell the run's own hooks from ours and PyTorch's.

    Args:
        hook: A callable that is registered as a hook.

    Returns:
        True of a hook of the user's or of another library.
    """
    made = getattr(hook, "func", hook)
    kind = made if hasattr(made, "__qualname__") else type(made)
    return type(hook) is not Hook and not str(kind.__module__).startswith("torch.")


class Refused(ValueError):
    """An argument that the user gave to a method, which is told where it was given."""


class Fenced(Protocol):
    """Who has a fence."""

    fence: Fence


F = TypeVar("F", bound=Fenced)
Method = Callable[Concatenate[F, P], R]


def entry(otherwise: Method[F, P, R]) -> Callable[[Method[F, P, R]], Method[F, P, R]]:
    """Decorate a method that the run calls by itself, so that an error of ours never reaches the run.

    Args:
        otherwise: Called with the method's arguments where the method raises; it gives the result in its place.

    Returns:
        A decorator of methods of a class with a `fence`. Only `Refused` passes through.
    """

    def decorate(method: Method[F, P, R]) -> Method[F, P, R]:
        @functools.wraps(method)
        def entered(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = method(self, *args, **kwargs)
            except Refused:
                raise
            except Exception as error:
                self.fence.fail(error)
                result = otherwise(self, *args, **kwargs)
            if self.fence.reason:
                self.fence.close()  # also the hooks that were left when one of them failed
            return result

        return entered

    return decorate


def told(error: BaseException) -> str:
    """Put on one line what failed.

    Args:
        error: What was raised while observing.

    Returns:
        Its class and message, at most 200 characters; and file and line in our code, if it was ours.
    """
    try:
        text = str(error).strip().splitlines() or [""]
    except Exception:  # of an exception that cannot be told
        text = [""]
    where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if _is_ours(f.filename)]
    return f"{type(error).__name__}: {text[0][:200]}" + (f" ({where[-1]})" if where and is_ours(error) else "")


def is_ours(error: BaseException) -> bool:
    """Decide whose fault an error is, by the innermost frame that is neither of a library nor passed through.

    Args:
        error: What was raised while observing.

    Returns:
        True if that frame is in this package, False if it is code that the user handed over.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_ours(frame.filename):
            return True
        if frame.filename not in PASSED_THROUGH and not _is_of_a_library(frame.filename):
            return False
    return True


def _is_of_a_library(filename: str) -> bool:
    """Of those that our own code calls."""
    of_python = filename.startswith(STDLIB) and "-packages" not in filename
    return of_python or filename.startswith((*LIBRARIES, "<"))


def _is_ours(filename: str) -> bool:
    return filename not in PASSED_THROUGH and filename.startswith(str(PACKAGE))


def _begun(see: See, *args: Any, **kwargs: Any) -> Seeing:
    seeing = see(*args, **kwargs)
    next(seeing, None)
    return seeing


def _ended(seeing: Seeing, result: Any) -> None:
    with suppress(StopIteration):
        seeing.send(result)
