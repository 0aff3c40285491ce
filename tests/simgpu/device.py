"""A second device in a build for CPUs: its tensors hold CPU data, say that they are on simgpu:0, and refuse to meet CPU tensors.

Import it in a process of its own, before the first backward: autograd counts devices once. Beside CUDA's rules of who may meet it
has a generator of its own, counts reads back to the host (`READS`), copies for which the host waits (`WAITED`), both of them
within the optimizer steps of recipes (`IN_STEPS`, with the function that is to blame) and live bytes (`MEMORY`), and has no
deterministic kernel for the operations in `NOT_DETERMINISTIC`. `unsteady()` makes products differ from run to run. Autocast casts
nothing. `entered()` switches it on.
"""

import sys
import threading
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.commands import ROOT

NAME = "simgpu"
PLACES = (str(ROOT / "harness"), str(ROOT / "examples"))
STEP = "recipes/recipe.py"  # whose `take_step` is an optimizer step
NOT_DETERMINISTIC = {"kthvalue", "histc", "put_", "_adaptive_avg_pool2d_backward"}
COPIES = {"copy_", "_to_copy", "_copy_from"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
SCALARS = {"_local_scalar_dense", "equal", "is_nonzero"}
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}  # how many, the host asks
# Beside elementwise operations, these take a number of the CPU.
NUMBERS = {"masked_fill", "masked_fill_", "fill_", "fill", "index_put", "index_put_"}
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, simgpu:0 and cpu!"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
READS = Counter()  # operations that brought numbers back to the host
WAITED = Counter()  # blocking copies from the host, by shape, and calls of `synchronize`
IN_STEPS = Counter()  # of both kinds, by operation and function
NOISE = {"relative": 0.0}  # of matrix products: see `unsteady`
GENERATOR = torch.Generator().manual_seed(0)
ATOMICS = torch.Generator().manual_seed(0)  # of the noise of products, which no seed of the caller repeats


@dataclass
class Memory:
    """Bytes of the storages that are alive on the device, and their peak."""

    now: int = 0
    peak: int = 0
    known: dict[int, int] = field(default_factory=dict)

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or size == 0:
            return
        self.known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key):
        self.now -= self.known.pop(key, 0)


MEMORY = Memory()
CAPACITY = 1 << 34


class Backend(_DummyBackendModule):
    """What `torch.simgpu` is."""

    def get_rng_state(self, device=None):
        return GENERATOR.get_state()

    def set_rng_state(self, state, device=None):
        GENERATOR.set_state(state)

    def manual_seed(self, seed):
        GENERATOR.manual_seed(seed)

    def manual_seed_all(self, seed):
        GENERATOR.manual_seed(seed)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def memory_allocated(self, device=None):
        return MEMORY.now

    def max_memory_allocated(self, device=None):
        return MEMORY.peak

    def mem_get_info(self, device=None):
        return CAPACITY - MEMORY.now, CAPACITY

    def reset_peak_memory_stats(self, device=None):
        MEMORY.peak = MEMORY.now

    def synchronize(self, device=None):
        WAITED["synchronize"] += 1


_setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
DEVICE = torch.device(NAME, 0)
AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
AUTOCAST.fallback(torch.library.fallthrough_kernel)  # autocast casts nothing here


class Sim(torch.Tensor):
    """A tensor of the device; `raw` holds its data."""

    @staticmethod
    def __new__(cls, raw):
        MEMORY.see(raw)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
            requires_grad=False,
        )
        made.raw = raw
        return made

    def __repr__(self):
        return f"Sim({self.raw})"

    def tolist(self):
        noted(READS, "tolist")
        return self.raw.tolist()

    def numpy(self, *_, **__):
        raise TypeError("can't convert simgpu:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_, **__):
        return self.numpy()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Sees factories (`torch.zeros(..., device=...)`), which have no tensor among their arguments."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """One operation: refused, or computed on the data with its result on the device where an argument is."""
    name = func._schema.name.split("::")[1]
    leaves = tree_leaves((args, kwargs))
    own = [leaf for leaf in leaves if isinstance(leaf, Sim)]
    asked = kwargs.get("device")
    target = None if asked is None else torch.device(asked).type
    on_device = target == NAME or (target is None and bool(own))
    if own and name not in COPIES:
        _check_same_device(func, args, leaves)
    if on_device and any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError("Expected a 'simgpu' device type for generator but found 'cpu'")
    if on_device and name in NOT_DETERMINISTIC:
        _alert(name)
    reads = name in SCALARS or (name == "_to_copy" and target == "cpu") or (name == "copy_" and not isinstance(args[0], Sim))
    if own and (reads or name in SIZES or _masks(name, args)):
        noted(READS, name)
    if name == "_to_copy" and target == NAME and not own and not kwargs.get("non_blocking"):
        noted(WAITED, f"copy of {list(args[0].shape)}")
    if name == "copy_" and isinstance(args[0], Sim) and len(own) == 1 and not (len(args) > 2 and args[2]):
        noted(WAITED, f"copy of {list(args[1].shape)}")
    for index in tree_leaves(args[1]) if own and name in INDEXING else ():
        if isinstance(index, Tensor) and not isinstance(index, Sim):
            noted(WAITED, f"index of {list(index.shape)}")
    raw_args, raw_kwargs = tree_map(_raw, args), tree_map(_raw, kwargs)
    if asked is not None:
        raw_kwargs["device"] = torch.device("cpu")
    draws = on_device and torch.Tag.nondeterministic_seeded in func.tags
    out = _drawn(lambda: func(*raw_args, **raw_kwargs)) if draws else func(*raw_args, **raw_kwargs)
    if name == "copy_":
        return args[0]
    if own and name in PRODUCTS and NOISE["relative"]:
        out = out * (1 + NOISE["relative"] * torch.randn(out.shape, dtype=out.dtype, generator=ATOMICS))
    if not on_device:
        return out
    known = {id(leaf.raw): leaf for leaf in own}

    def back(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else Sim(leaf)

    return tree_map(back, out)


def _raw(leaf):
    return leaf.raw if isinstance(leaf, Sim) else leaf


def noted(what, name):
    """Count it, and where it happens within an optimizer step the function of the repository that it comes from."""
    what[name] += 1
    frames = list(_frames(sys._getframe(1)))
    main = threading.main_thread()
    if threading.current_thread() is not main:  # a hook: the backward of a device has a thread of its own
        frames += _frames(sys._current_frames()[main.ident or 0])
    codes = [frame.f_code for frame in frames]
    if any(code.co_name == "take_step" and code.co_filename.endswith(STEP) for code in codes):
        own = next(code for code in codes if code.co_filename.startswith(PLACES))
        IN_STEPS[f"{name} in {Path(own.co_filename).stem}.{own.co_name}"] += 1


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def _masks(name, args):
    """Whether the rows that it takes are chosen by a mask on the device: their number is read, unless one number is put there."""
    if name not in INDEXING or not any(isinstance(i, Sim) and i.dtype in (torch.bool, torch.uint8) for i in tree_leaves(args[1])):
        return False
    return not (len(args) > 2 and isinstance(args[2], Tensor) and args[2].numel() == 1)


def _check_same_device(func, args, leaves):
    """Elementwise, CPU tensors of no dimension are numbers, unless they are to hold the result; indices may be the host's."""
    name = func._schema.name.split("::")[1]
    numbers = torch.Tag.pointwise in func.tags or name in NUMBERS or name.startswith("_foreach")
    strangers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Sim)]
    if name in INDEXING:
        if not isinstance(args[0], Sim):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        indices = {id(leaf) for leaf in tree_leaves(args[1])}
        strangers = [leaf for leaf in strangers if id(leaf) not in indices]
    in_place = name.endswith("_") and isinstance(args[0], Tensor) and not isinstance(args[0], Sim)
    if in_place or [leaf for leaf in strangers if leaf.dim() > 0 or not numbers]:
        raise RuntimeError(f"{TWO_DEVICES} ({name})")


def _alert(name):
    if not torch.are_deterministic_algorithms_enabled():
        return
    told = f"{name}_simgpu_kernel does not have a deterministic implementation, but you set a deterministic mode"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(told)
    warnings.warn(told, stacklevel=2)


def _drawn(compute):
    """With the device's generator in the place of the host's."""
    host = torch.get_rng_state()
    torch.set_rng_state(GENERATOR.get_state())
    try:
        return compute()
    finally:
        GENERATOR.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


@contextmanager
def unsteady(relative):
    """Inside, each entry of a matrix product is off by about that share of itself, another one each time: as atomics make it."""
    NOISE["relative"] = relative
    try:
        yield
    finally:
        NOISE["relative"] = 0.0


_tensor = torch.tensor


def _made(data, *, device=None, **settings):
    made = _tensor(data, **settings)
    return made if device is None else made.to(device)


def _as_tensor(data, dtype=None, device=None):
    made = data if isinstance(data, Tensor) else _tensor(data)
    made = made if dtype is None else made.to(dtype)
    return made if device is None else made.to(device)


@contextmanager
def entered():
    """Inside, tensors can be made on the device, and it is what the harness chooses."""
    import accumulation_harness.measure.plan  # noqa: F401
    import accumulation_harness.measure.studies  # noqa: F401 (with all that chooses a device)
    from accumulation_harness.recipes import determinism

    chooses = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("accumulation_harness") and getattr(module, "choose_device", None) is determinism.choose_device
    ]
    with (
        mock.patch.object(torch, "tensor", _made),
        mock.patch.object(torch, "as_tensor", _as_tensor),
        _all(mock.patch.object(module, "choose_device", lambda device: DEVICE) for module in chooses),
        Mode(),
    ):
        yield DEVICE


_rand = torch.rand


@contextmanager
def entered_as_cuda():
    """The same, and it is what an audit and a watch take for CUDA: its generator, and a kind of tensor that they know."""
    from accumulation_harness.observe import tensors

    known = tensors._adds_nothing
    states = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state_all": lambda: [GENERATOR.get_state()],
        "set_rng_state_all": lambda states: GENERATOR.set_state(states[0]),
    }
    with (
        entered() as device,
        mock.patch.multiple(torch.cuda, **states),
        mock.patch.object(
            torch, "rand", lambda *size, device=None, **rest: _rand(*size, device=DEVICE if device == "cuda" else device, **rest)
        ),
        mock.patch.object(tensors, "_adds_nothing", lambda kind: kind is Sim or known(kind)),
    ):
        yield device


@contextmanager
def _all(patches):
    from contextlib import ExitStack

    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
