"""What a trial is made of: frozen dataclasses and the names that their fields can have.

Hydra and OmegaConf stop at `run.py`; everything below it reads these values and nobody writes to them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accumulation_harness.config.declare import FLOAT16_MAX, MOST_SAMPLES, MOST_STEPS, Bounds, setting
from accumulation_harness.system.enums import StrEnum

DECAY = Bounds(0.0, 1.0, "the share that a moving average keeps at each step", excludes_high=True)


class ConfigError(ValueError):
    """A setting that cannot be run: names the field, the value, and what was expected."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(name, value, expected)  # what it is pickled by, on its way from another process
        self.field = name

    def __str__(self) -> str:
        name, value, expected = self.args
        shown = str(value)
        return f"{name}={shown if len(shown) <= 300 else f'{shown[:100]}...'}: expected {expected}"


class NotReproducible(UserWarning):
    """Operations that compute another result each time: there is no deterministic kernel for them on the device."""


class Data(StrEnum):
    """The data; `workload=NAME` sets data and model, and NAME may also be digits_mlp or digits_resnet18."""

    digits = "digits"
    mnist1d = "mnist1d"  # from its own generator
    text = "text"
    python_bytes = "python_bytes"  # sources that are installed anyway
    pairs = "pairs"
    policy = "policy"
    docstrings = "docstrings"  # of functions, with their source
    class_weights = "class_weights"  # the digits; so is the next
    ignored_labels = "ignored_labels"
    custom = "custom"  # the user's own, at `workload.target`


TUNING_SEEDS = 100  # and above: of trials that choose learning rates; the others judge
COUPLED = (Data.pairs, Data.policy, Data.docstrings)  # whose losses take something from the other samples


class Model(StrEnum):
    """The network; each kind of data has those that fit it."""

    conv = "conv"
    conv1d = "conv1d"  # of mnist1d
    mlp = "mlp"
    resnet18 = "resnet18"
    transformer = "transformer"
    towers = "towers"  # two encoders of bytes


class Contrast(StrEnum):
    """The loss of pairs whose negatives are the other pairs of the batch (`workloads/contrastive.py`)."""

    symmetric = "symmetric"  # InfoNCE of queries among passages and of passages among queries
    one_sided = "one_sided"  # InfoNCE of queries among passages
    sigmoid = "sigmoid"  # SigLIP's: every pair by itself


class Norm(StrEnum):
    """The normalisation layers of the model; `as_is` keeps those of a model of your own."""

    as_is = "as_is"  # those that a model of the user's own has
    none = "none"
    batch = "batch"
    group = "group"
    layer = "layer"


@dataclass(frozen=True)
class Kind:
    """What goes with a kind of data."""

    models: tuple[Model, ...]  # that fit it, the usual one first
    norms: tuple[Norm, ...] = (Norm.none, Norm.batch, Norm.group, Norm.layer)
    takes_root: bool = False  # whether it is read from the files of a folder where one is given


CONV, MLP = (Model.conv, Model.mlp, Model.resnet18), (Model.mlp, Model.conv, Model.resnet18)
KINDS = {
    Data.digits: Kind(CONV),
    Data.mnist1d: Kind((Model.conv1d,)),
    Data.text: Kind((Model.transformer,), (Norm.layer, Norm.none)),
    Data.python_bytes: Kind((Model.transformer,), (Norm.layer, Norm.none)),
    Data.pairs: Kind((Model.mlp,)),
    Data.policy: Kind(CONV),
    Data.docstrings: Kind((Model.towers,), (Norm.none,), takes_root=True),
    Data.class_weights: Kind(MLP),
    Data.ignored_labels: Kind(MLP),
}


class OptimizerName(StrEnum):
    """The optimizer, one of PyTorch's or your own; `optimizer=NAME` sets it and a learning rate that suits it."""

    sgd = "sgd"
    momentum = "momentum"
    nesterov = "nesterov"
    adam = "adam"
    adamw = "adamw"
    custom = "custom"  # at `optimizer.target`


class ScheduleName(StrEnum):
    """The course of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"


class Precision(StrEnum):
    """The format under test: the 16-bit ones through autocast, float16 with a loss scaler."""

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Execution(StrEnum):
    """How the model runs in the precision under test."""

    eager = "eager"
    compile = "compile"
    cuda_graph = "cuda_graph"


class Split(StrEnum):
    """How a window is cut into micro-batches: of equal or of unequal sizes."""

    even = "even"
    ragged = "ragged"


class LastWindow(StrEnum):
    """What becomes of the samples that fill no window at the end of an epoch: a short window, or left out."""

    keep = "keep"
    drop = "drop"


class Device(StrEnum):
    """Where a trial runs; `auto` takes the GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Arms(StrEnum):
    """Where the compared models are: all in memory, or one at a time and the others in files; `auto` by the room there is."""

    auto = "auto"
    together = "together"
    one_by_one = "one_by_one"


class TrackingMode(StrEnum):
    """Whether trials are mirrored to W&B: to a local log, to a server, or not at all; `tracking=MODE` sets it."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


def _name_of_target(target: str | None) -> str:
    """The NAME of `FILE.py:NAME` or `package.module:NAME`."""
    return (target or "custom").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Data, model and the size of the model."""

    data: Data = setting(Data.digits)
    model: Model = setting(Model.conv)
    width: int = setting(
        8,
        "channels of the first layer (conv), 1/8 of the features (resnet18, mlp), 1/3 (conv1d, transformer), all (towers)",
        Bounds(1, 512, "memory grows with its square; the usual ResNet-18 has 8"),
    )
    depth: int = setting(
        2,
        "transformer blocks; the image models have a fixed depth",
        Bounds(1, 64, "every block is kept for each arm"),
    )
    dropout: float = setting(
        0.0,
        "probability that an activation is dropped",
        Bounds(0.0, 1.0, "a probability, at 1 nothing is left to train", excludes_high=True),
    )
    penalty: float = setting(
        0.0,
        "coefficient of the squared norm of the last weight matrix, which is added to the loss",
        Bounds(0.0, FLOAT16_MAX, "a coefficient of the loss, which has to stay within float16"),
    )
    contrast: Contrast = setting(Contrast.symmetric, "the loss of the workload docstrings")
    target: str | None = setting(None, "FILE.py:NAME or package.module:NAME of a task, with `workload=custom`")
    args: dict[str, Any] = setting({}, "keyword arguments of that task; the + adds a key")
    source: str | None = None  # what fingerprint() of the task says of its data, filled in before a trial is named

    @property
    def label(self) -> str:
        """The name in tables: the data, and the model where it is not the usual one for that data; a task's own name."""
        if self.data == Data.custom:
            return _name_of_target(self.target)
        return str(self.data) if KINDS[self.data].models[0] == self.model else f"{self.data}_{self.model}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from; `root` is a local folder, never an address."""

    root: str | None = setting(None, "a local folder: the docstrings of its *.py files are the data of `workload=docstrings`")
    last_window: LastWindow = setting(LastWindow.keep)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its settings; each takes those that it has, one of the user's own `lr`, `weight_decay` and `args`."""

    name: OptimizerName = setting(OptimizerName.sgd)
    # A step is lr times a gradient, decay times a weight: what a gradient of 1 gives has to stay within the formats under test.
    lr: float = setting(
        0.1,
        "learning rate",
        Bounds(1e-16, FLOAT16_MAX, "below it no float64 weight moves, above it a step leaves float16"),
        also=("learning_rate",),
    )
    momentum: float = setting(0.9, "of momentum and nesterov: the share of the buffer that stays at each step", DECAY)
    beta1: float = setting(0.9, "of adam and adamw: the share of the first moment that stays", DECAY)
    beta2: float = setting(0.999, "of adam and adamw: the share of the second moment that stays", DECAY)
    eps: float = setting(
        1e-8,
        "of adam and adamw: added to the root of the second moment",
        Bounds(2e-38, FLOAT16_MAX, "below it float32 has a zero, by which Adam divides"),
    )
    weight_decay: float = setting(
        0.0,
        "factor of the weights, which is added to the gradient (adamw: to the step)",
        Bounds(0.0, FLOAT16_MAX, "a factor of the weights, which have to stay within float16"),
    )
    target: str | None = setting(None, "FILE.py:NAME or package.module:NAME of what makes the optimizer, with `optimizer=custom`")
    args: dict[str, Any] = setting({}, "its other keyword arguments; the + adds a key")

    @property
    def label(self) -> str:
        """The name in tables."""
        return _name_of_target(self.target) if self.name == OptimizerName.custom else str(self.name)


class State(StrEnum):
    """What an optimizer remembers of former gradients."""

    none = "none"
    buffer = "buffer"  # a moving sum of gradients
    moments = "moments"  # moving averages of gradients, their squares, or both: a scale of the gradient cancels


@dataclass(frozen=True)
class TorchOptimizer:
    """An optimizer of PyTorch: its class in `torch.optim`, what it remembers, its arguments besides `lr` and `weight_decay`."""

    made_by: str
    state: State
    arguments: Callable[[OptimizerConfig], dict[str, Any]] = lambda config: {}


def _moments(config: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "eps": config.eps}


# In the order of tables and figures. One more: its name above, its row here, and a file in conf/optimizer/ with its rate.
OPTIMIZERS = {
    OptimizerName.sgd: TorchOptimizer("SGD", State.none),
    OptimizerName.momentum: TorchOptimizer("SGD", State.buffer, lambda c: {"momentum": c.momentum}),
    OptimizerName.nesterov: TorchOptimizer("SGD", State.buffer, lambda c: {"momentum": c.momentum, "nesterov": True}),
    OptimizerName.adam: TorchOptimizer("Adam", State.moments, _moments),
    OptimizerName.adamw: TorchOptimizer("AdamW", State.moments, _moments),
}
OUR_OPTIMIZERS = tuple(OPTIMIZERS)


def state_of(name: str) -> State | None:
    """Say what the optimizer of a name remembers from step to step.

    Args:
        name: The value of `optimizer.name`.

    Returns:
        Its state; None of an optimizer that is not ours, which may remember anything.
    """
    return OPTIMIZERS[OptimizerName(name)].state if name in OUR_OPTIMIZERS else None


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate factor by optimizer step."""

    name: ScheduleName = setting(ScheduleName.constant)
    warmup_steps: int = setting(
        0,
        "optimizer steps over which the learning rate rises linearly",
        Bounds(0, MOST_STEPS, "a trial has no more steps"),
        also=("warmup", "lr_scheduler"),
    )


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The W&B mirror: where its runs go."""

    mode: TrackingMode = setting(TrackingMode.offline, also=("wandb",))
    project: str = setting("accumulation-harness", "of W&B")
    entity: str | None = setting(None, "user or team of W&B")
    per_arm: bool = setting(False, "also a W&B run for every model that is compared, beside that of its trial")


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Everything that can change a number of a trial, and nothing else: its hash is the trial's identity."""

    experiment: str = "single"
    study: str = setting("verdicts", "what a trial measures: `verdicts` judges each N; named experiments set other values")
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    norm: Norm = setting(Norm.none)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip_norm: float | None = setting(
        None,
        "largest norm of the gradient, clipped once per optimizer step",
        Bounds(1e-12, 1e12, "Adam squares the clipped gradient, which float32 has to represent"),
        also=("clip", "max_grad_norm", "grad_clip"),
    )
    ema_decay: float | None = setting(
        None,
        "decay of a moving average of the weights, updated once per optimizer step",
        Bounds(0.0, 1.0, "the share of the average that stays", excludes_low=True, excludes_high=True),
    )
    precision: Precision = setting(Precision.float32, also=("dtype", "amp", "fp16", "bf16"))
    # 2**12, not PyTorch's 2**16: gradients of small nets come near 1, and 2**16 would overflow float16 at the first step.
    loss_scale: float = setting(
        4096.0,
        "initial loss scale with float16",
        Bounds(1e-8, 1e10, "gradients times it have to come within float16, a halving for each step skipped"),
    )
    device: Device = setting(Device.auto)
    execution: Execution = setting(Execution.eager)
    arms: Arms = setting(Arms.auto)
    effective_batch: int = setting(
        64,
        "B: samples of one optimizer step",
        Bounds(1, MOST_SAMPLES, "no data set has more training samples"),
        also=("B", "batch_size", "global_batch_size"),
    )
    accumulation_steps: tuple[int, ...] = setting(
        (2, 4, 8, 16),
        "N: micro-batches of b = B / N samples; each N is a run of its own",
        Bounds(1, MOST_SAMPLES, "a micro-batch has a sample or more"),
        also=("N", "b", "gradient_accumulation_steps", "accumulate_grad_batches", "micro_batch_size"),
    )
    split: Split = setting(Split.even)
    steps: int = setting(
        60,
        "optimizer steps of training in the precision under test",
        Bounds(1, MOST_STEPS, "every arm takes each, and leaves a row of it"),
        also=("epochs", "max_steps", "num_steps"),
    )
    algebra_steps: int | None = setting(
        None,
        "windows that are compared in float64; null: ten, an epoch's short last one, the next, and those at large differences",
        Bounds(1, MOST_STEPS, "every arm takes each, in float64"),
    )
    probe_every: int = setting(
        10,
        "optimizer steps between two probes: the gradients of all micro-batches, and the window's in float64",
        Bounds(1, 10**9, "optimizer steps; above `steps`, the first alone is probed"),
    )
    referee_every: int = setting(
        50,
        "optimizer steps between two measurements of each model's gradient error in float64, the most expensive measure",
        Bounds(1, 10**9, "optimizer steps; above `steps`, the first alone is refereed"),
    )
    permutations: int = setting(
        30,
        "largest number of row orders in which rounding is measured; fewer are used if they suffice",
        Bounds(30, 10_000, "each is a gradient of every arm"),  # the last limits of L1 need 30 (docs/equivalence.md)
    )
    nulls: int = setting(
        2,
        "controls for rounding: large-batch runs with shuffled rows; one more run starts with weights one rounding unit off",
        Bounds(1, 100, "each is a model with its optimizer, trained beside the others"),
    )
    faults: tuple[str, ...] = setting(
        (), "runs that are wrong on purpose: names of causes, `all`, or `scale@1e-6` (gradients 1e-6 too large)"
    )
    methods: tuple[str, ...] = setting(
        (),
        "other ways to accumulate a loss with in-batch negatives, beside the plain one: grad_cache, dual_bank@32 (of 32 rows)",
    )
    trained_arm: str | None = setting(
        None, "the only training to run (small_batch-16, say) in an experiment that chooses a learning rate for each; null: all"
    )
    seed: int = setting(
        0, "seed of the weights, the order of the samples and every random draw", Bounds(0, 2**63 - 1, "what a generator takes")
    )


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(TrialConfig):
    """A trial, and where and how it runs."""

    name: str | None = setting(None, "name of your sweep: its folder in the results, and its part of the report")
    results: str = setting("results", "folder of the results", also=("out", "output", "output_dir"))
    workers: int = setting(
        0,
        "trials at the same time (on each GPU); 0 is one per core, or per GPU",
        Bounds(0, 1024, "processes; 0 is one per core"),
    )
    trial_seconds: float = setting(
        0.0, "time after which a trial is ended, and has failed; 0: no limit", Bounds(0.0, 1e8, "three years are enough")
    )
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def trial(self) -> TrialConfig:
        """The part that decides the numbers."""
        return TrialConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrialConfig)})


def to_dict(config: Any) -> dict[str, Any]:
    """Turn a configuration into plain JSON types.

    Args:
        config: An instance of any of the configuration's dataclasses.

    Returns:
        Nested dictionaries in field order; an enum is its value, a tuple a list.
    """
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain
