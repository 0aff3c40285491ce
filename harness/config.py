"""What a trial is made of: frozen dataclasses, the checks that a schema cannot make, and the name of a trial.

Hydra and OmegaConf stop at `run.py`; everything below it reads these values and nobody writes to them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from harness.bounds import BOUNDS, MOST_ARMS, MOST_WINDOW_SAMPLES
from harness.enums import StrEnum


class ConfigError(ValueError):
    """A setting that cannot be run: names the field, the value, and what was expected."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        super().__init__(name, value, expected)  # what it is pickled by, on its way from another process
        self.field = name

    def __str__(self) -> str:
        name, value, expected = self.args
        return f"{name}={value}: expected {expected}"


class NotReproducible(UserWarning):
    """Operations that compute another result each time: there is no deterministic kernel for them on the device."""


class Data(StrEnum):
    """What is trained on; `workload=NAME` chooses data and model together."""

    digits = "digits"
    mnist = "mnist"
    cifar10 = "cifar10"
    mnist1d = "mnist1d"  # from its own generator
    text = "text"
    python_bytes = "python_bytes"  # sources that are installed anyway
    pairs = "pairs"
    policy = "policy"
    docstrings = "docstrings"  # of functions, with their source
    class_weights = "class_weights"  # the digits; so is the next
    ignored_labels = "ignored_labels"
    custom = "custom"  # the user's own, at `workload.target`


EMBEDDED_DIGITS = (Data.digits, Data.pairs, Data.policy, Data.class_weights, Data.ignored_labels)
EMBEDDED = (*EMBEDDED_DIGITS, Data.mnist1d, Data.python_bytes)
TEXTS = (Data.text, Data.python_bytes)


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
    """The loss of pairs whose negatives are the other pairs of the batch (`harness/workloads/contrastive.py`)."""

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


OUR_NORMS = tuple(norm for norm in Norm if norm != Norm.as_is)


class OptimizerName(StrEnum):
    """The optimizer: one of PyTorch's, or your own."""

    sgd = "sgd"
    momentum = "momentum"
    nesterov = "nesterov"
    adam = "adam"
    adamw = "adamw"
    custom = "custom"  # at `optimizer.target`


OUR_OPTIMIZERS = tuple(name for name in OptimizerName if name != OptimizerName.custom)


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


class Study(StrEnum):
    """What is measured of a trial; the others than `verdicts` serve the named experiments."""

    verdicts = "verdicts"  # every arm judged, L0 to L3
    convergence = "convergence"  # training alone, for many seeds
    learning_curves = "learning_curves"  # training to a plateau, and small batches beside it, at equal samples
    balance_loss = "balance_loss"  # of a mixture of experts, per micro-batch and per window
    muon = "muon"  # its orthogonalised update of a window, accumulated and per micro-batch
    model_bytes = "model_bytes"
    memory_and_time = "memory_and_time"  # of a window, over N
    remedies = "remedies"  # for BatchNorm, trained beside plain accumulation
    batch_statistics = "batch_statistics"  # of BatchNorm over one window, exactly
    optimizer_states = "optimizer_states"  # optimizer state in float64: accumulated, reordered, small steps
    batch_sizes = "batch_sizes"  # training alone at B and at every B / N, at equal samples and at equal steps
    batch_order = "batch_order"  # large batches first and small ones then, and the reverse, at equal samples
    critical_batch = "critical_batch"  # one training, branched at several points into copies with batches of their own
    rescaling = "rescaling"  # a batch k times as large: what has to be rescaled to train as the small one did
    optimizer_memory = "optimizer_memory"  # with which weight past samples are in an optimizer's state
    epoch_tail = "epoch_tail"  # the loop over a loader, at the end of an epoch
    update_size = "update_size"  # how far one step moves, over N
    resumption = "resumption"  # from a checkpoint at a window's boundary or inside it
    clipping_threshold = "clipping_threshold"
    adaptive_windows = "adaptive_windows"  # another N at every window
    tensor_norms = "tensor_norms"  # of the gradient, tensor by tensor
    gradient_noise = "gradient_noise"  # every sample's gradient, at points along a training
    adam_scale = "adam_scale"  # what a gradient N times too large does under an optimizer, its eps, decay and clipping
    second_moment = "second_moment"  # Adam's, of windows and of micro-batches
    accumulators = "accumulators"  # rounding with the sum kept in float32, bfloat16, float16
    randomness = "randomness"  # one gradient over many draws of dropout's masks
    loss_scaling = "loss_scaling"  # a healthy window, one that overflows, and a healthy one
    replicas = "replicas"  # two processes, each with its share of the window
    negatives = "negatives"  # in-batch negatives: each method's gradient of one window beside the full batch's, exactly
    retrieval = "retrieval"  # each of these methods trained: recall, bytes, seconds
    method_memory = "method_memory"  # the bytes that live in a step of each of these methods, over B


class TrackingMode(StrEnum):
    """Whether trials are mirrored to W&B: to a local log, to a server, or not at all."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


def name_of_target(target: str | None) -> str:
    """The NAME of `FILE.py:NAME` or `package.module:NAME`."""
    return (target or "custom").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Data, model and the size of the model."""

    data: Data = Data.digits
    model: Model = Model.conv
    width: int = 8  # channels of the first layer (conv), hidden units (mlp), a third of the embedding (transformer)
    depth: int = 2  # transformer blocks; the image models have a fixed depth
    dropout: float = 0.0  # probability of an activation to be dropped
    penalty: float = 0.0  # coefficient of the squared norm of the last weight matrix, which is added to the loss
    contrast: Contrast = Contrast.symmetric  # the loss of docstrings
    hard_negatives: int = 0  # of docstrings, for each pair: passages of the same module
    target: str | None = None  # FILE.py:NAME or package.module:NAME of a task, with data=custom
    args: dict[str, Any] = field(default_factory=dict, hash=False)  # keyword arguments of that task
    source: str | None = None  # fingerprint of the task's source, filled in before a trial is named

    @property
    def label(self) -> str:
        """The name in tables: the data, and the model where it is not the usual one for that data; a task's own name."""
        if self.data == Data.custom:
            return name_of_target(self.target)
        usual = {
            Data.cifar10: Model.resnet18,
            Data.mnist1d: Model.conv1d,
            Data.text: Model.transformer,
            Data.python_bytes: Model.transformer,
            Data.pairs: Model.mlp,
            Data.docstrings: Model.towers,
            Data.class_weights: Model.mlp,
            Data.ignored_labels: Model.mlp,
        }.get(self.data, Model.conv)
        return str(self.data) if usual == self.model else f"{self.data}_{self.model}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from; `root` is a local folder, never an address."""

    root: str | None = None  # a local folder that holds mnist, cifar10 or a text
    last_window: LastWindow = LastWindow.keep


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer and its settings; each takes those that it has, one of the user's own `lr`, `weight_decay` and `args`."""

    name: OptimizerName = OptimizerName.sgd
    lr: float = 0.1  # learning rate
    momentum: float = 0.9  # of momentum and nesterov: the share of the buffer that stays at each step
    beta1: float = 0.9  # of adam and adamw: the share of the first moment that stays
    beta2: float = 0.999  # of adam and adamw: the share of the second moment that stays
    eps: float = 1e-8  # of adam and adamw: added to the root of the second moment
    weight_decay: float = 0.0  # times the weights: part of the gradient, or of the step with adamw
    target: str | None = None  # FILE.py:NAME or package.module:NAME of what makes the optimizer, with name=custom
    args: dict[str, Any] = field(default_factory=dict, hash=False)  # its other keyword arguments
    source: str | None = None  # fingerprint of its source, filled in before a trial is named

    @property
    def label(self) -> str:
        """The name in tables."""
        return name_of_target(self.target) if self.name == OptimizerName.custom else str(self.name)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate factor by optimizer step."""

    name: ScheduleName = ScheduleName.constant
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises linearly


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The W&B mirror: where its runs go."""

    mode: TrackingMode = TrackingMode.offline
    project: str = "accumulation-harness"  # of W&B
    entity: str | None = None  # of W&B: a user or a team
    per_arm: bool = False  # also a W&B run for every model that is compared, beside that of its trial


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Everything that can change a number of a trial, and nothing else: its hash is the trial's identity."""

    experiment: str = "single"
    study: Study = Study.verdicts
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    norm: Norm = Norm.none
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip_norm: float | None = None  # largest norm of the gradient, clipped once per optimizer step
    ema_decay: float | None = None  # of a moving average of the weights, updated once per optimizer step
    precision: Precision = Precision.float32
    # 2**12, not PyTorch's 2**16: gradients of small nets come near 1, and 2**16 would overflow float16 at the first step.
    loss_scale: float = 4096.0  # of float16, at the first step
    device: Device = Device.auto
    execution: Execution = Execution.eager
    arms: Arms = Arms.auto
    effective_batch: int = 64  # B: samples of one optimizer step
    accumulation_steps: tuple[int, ...] = (2, 4, 8, 16)  # N: micro-batches of b = B / N samples; each N is a run of its own
    split: Split = Split.even
    steps: int = 60  # optimizer steps of training in the precision under test
    algebra_steps: int | None = None  # windows of the comparison in float64; null: as many as hold all that it tests
    probe_every: int = 10  # optimizer steps between two looks at the micro-batches' gradients, and in float64 at the window's
    referee_every: int = 50  # optimizer steps between two float64 gradients of every compared model, the most expensive measure
    permutations: int = 30  # orders of the rows in which rounding is measured, at most: fewer where they decide
    nulls: int = 2  # controls: large-batch runs whose rows are shuffled, beside one that starts one ulp off
    faults: tuple[str, ...] = ()  # runs that are wrong on purpose: names of causes, `all`, or `scale@1e-6` (a planted error)
    methods: tuple[str, ...] = ()  # what replaces plain accumulation with in-batch negatives: grad_cache, a bank of some SIZE
    seed: int = 0  # of the weights, the order of the samples and every random draw


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(TrialConfig):
    """A trial, and where and how it runs."""

    name: str | None = None  # of your sweep: its folder in the results, and its part of the page
    results: str = "results"  # folder of the results
    workers: int = 0  # trials at the same time; 0 is one per core, or one on a GPU
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def trial(self) -> TrialConfig:
        """The part that decides the numbers."""
        return TrialConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrialConfig)})


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON types, nested, in field order."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def identity(config: TrialConfig) -> str:
    """Name of a trial: what a reader wants to see, then 10 hex digits of the SHA-256 of the settings other than the defaults.

    So a new setting leaves every stored trial its name. Once trials are stored, a default can only be changed to a smaller
    measurement (`algebra_steps`, `nulls`): the trials of before have its name, and more evidence than it asks
    for. `device` is to be resolved beforehand
    (`harness.sweep.experiment.resolved`): here `auto` counts as `cpu`.
    """
    device = Device.auto if config.device == Device.cpu else config.device
    workload, optimizer = _moved(config.workload), _moved(config.optimizer)
    same = dataclasses.replace(config, device=device, workload=workload, optimizer=optimizer, arms=Arms.auto)
    return _named(config, differing(same))


def _moved(own: Any) -> Any:
    """Settings whose target is known by its fingerprint: the folder that its file lies in is no part of a trial's identity."""
    return own if own.source is None else dataclasses.replace(own, target=name_of_target(own.target))


def differing(config: Any) -> dict[str, Any]:
    """The settings of a configuration that differ from their defaults, nested, as plain JSON types."""
    kind: Any = type(config)
    return _differing(to_dict(config), _defaults(kind))


@cache
def _defaults(kind: Callable[[], Any]) -> dict[str, Any]:
    return to_dict(kind())


def _differing(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _differing(value, usual[name]) if isinstance(value, dict) and name in usual else value
        for name, value in values.items()
        if name not in usual or value != usual[name]
    }


# What the defaults were while identities were hashes of whole configurations.
FORMER_DEFAULTS = json.loads("""{
 "experiment": "single", "study": "verdicts", "norm": "none", "clip_norm": null, "ema_decay": null, "precision": "float32",
 "loss_scale": 4096.0, "device": "auto", "execution": "eager", "effective_batch": 64, "accumulation_steps": [2, 4, 8, 16],
 "split": "even", "steps": 60, "algebra_steps": 200, "probe_every": 10, "referee_every": 50, "permutations": 30, "nulls": 5,
 "faults": [], "seed": 0, "data": {"root": null, "last_window": "keep"}, "schedule": {"name": "constant", "warmup_steps": 0},
 "workload": {"data": "digits", "model": "conv", "width": 8, "depth": 2, "dropout": 0.0, "penalty": 0.0},
 "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.0}
}""")


def legacy_identity(config: TrialConfig) -> str | None:
    """Name under which older stores hold this trial: the hash of all settings there were. None where a younger setting is used.

    To be looked up only; no trial is stored under it any more.
    """
    changed = differing(config)
    former = _merged(FORMER_DEFAULTS, changed)
    return _named(config, former) if _differing(former, FORMER_DEFAULTS) == changed else None


def _merged(values: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """`values` as far as they are not changed; a change of what they do not have is left out."""
    return {
        name: _merged(value, changed.get(name, {})) if isinstance(value, dict) else changed.get(name, value)
        for name, value in values.items()
    }


def _named(config: TrialConfig, hashed: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:10]
    return f"{config.workload.label}-{config.norm}-{config.optimizer.label}-{config.precision}-seed{config.seed}-{digest}"


@dataclass(frozen=True)
class Need:
    """What a study needs of a setting: without it there is nothing that it could measure."""

    name: str  # of the field
    is_met: Callable[[TrialConfig], bool]
    expected: str

    def check(self, config: TrialConfig) -> None:
        """Raise `ConfigError` where it is not met."""
        if not self.is_met(config):
            value = value_of(config, self.name)
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(self.name, shown, f"{self.expected}, with study={config.study}")


_OWN_GRADIENTS = (
    Need("norm", lambda c: c.norm != Norm.batch, "none, group or layer: under BatchNorm a sample has no gradient of its own"),
    Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss in which a sample has a gradient of its own"),
)
_EQUAL_SPLIT = Need("split", lambda c: c.split == Split.even, "even: it speaks of micro-batches of one size b")

NEEDS: dict[Study, tuple[Need, ...]] = {
    Study.balance_loss: (
        _EQUAL_SPLIT,
        Need("workload.data", lambda c: c.workload.data in (Data.digits, Data.mnist1d), "digits or mnist1d, images"),
        Need("data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: every micro-batch weighs the same"),
    ),
    Study.batch_order: (
        _EQUAL_SPLIT,
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: each half has its own"),
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.custom, "one of ours, whose rate for B / N is known"),
    ),
    Study.critical_batch: (
        _EQUAL_SPLIT,
        Need("steps", lambda c: c.steps >= 8, "8 or more: a branch is an eighth of the training"),
        Need("accumulation_steps", lambda c: max(c.accumulation_steps) > 1, "some N above 1: a smaller batch"),
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: branches begin at all points"),
        Need("schedule.warmup_steps", lambda c: c.schedule.warmup_steps == 0, "0: every branch would warm up again"),
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.custom, "one of ours, whose rate for B / N is known"),
    ),
    Study.rescaling: (
        _EQUAL_SPLIT,
        Need("accumulation_steps", lambda c: len(c.accumulation_steps) == 1 and c.accumulation_steps[0] > 1, "one k above 1"),
        Need("steps", lambda c: c.steps >= 16, "16 or more: a curve has so many points"),
        Need("optimizer.name", lambda c: c.optimizer.name == OptimizerName.adamw, "adamw: what is rescaled are its settings"),
        Need("ema_decay", lambda c: c.ema_decay is not None, "a decay: the averaged weights are looked at"),
        Need("schedule.name", lambda c: c.schedule.name == ScheduleName.constant, "constant: after the warm-up"),
        Need(
            "schedule.warmup_steps",
            lambda c: (c.schedule.warmup_steps + 1) % c.accumulation_steps[0] == 0,
            "one less than a multiple of k: the large batch warms up over the same samples",
        ),
        Need("data.last_window", lambda c: c.data.last_window == LastWindow.drop, "drop: all windows are of one size"),
    ),
    Study.muon: (
        _EQUAL_SPLIT,
        Need("optimizer.label", lambda c: c.optimizer.label == "MuonAndAdam", "target=harness.recipes.muon:MuonAndAdam"),
        Need("precision", lambda c: c.precision != Precision.float16, "one without a loss scale"),
    ),
    Study.remedies: (
        Need("norm", lambda c: c.norm in (Norm.batch, Norm.as_is), "batch: the remedies are BatchNorm's"),
        Need("execution", lambda c: c.execution != Execution.cuda_graph, "eager or compile: a remedy works inside the forward"),
    ),
    Study.batch_statistics: (
        Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),
    ),
    Study.optimizer_memory: (
        Need("optimizer.name", lambda c: c.optimizer.name != OptimizerName.sgd, "an optimizer that has a memory"),
    ),
    Study.epoch_tail: (
        _EQUAL_SPLIT,
        Need("workload.penalty", lambda c: c.workload.penalty == 0, "0: the loop is written without"),
        Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss that is a mean over samples"),
    ),
    Study.resumption: (Need("steps", lambda c: c.steps >= 3, "3 or more: the third window is interrupted"),),
    Study.gradient_noise: (
        *_OWN_GRADIENTS,
        Need("workload.data", lambda c: c.workload.data != Data.custom, "a workload of ours: it differentiates sample by sample"),
        Need("accumulation_steps", lambda c: c.accumulation_steps[0] > 1, "two or more micro-batches to begin with"),
    ),
    Study.second_moment: (
        *_OWN_GRADIENTS,
        _EQUAL_SPLIT,
        Need("optimizer.name", lambda c: c.optimizer.name in (OptimizerName.adam, OptimizerName.adamw), "adam or adamw"),
    ),
    Study.randomness: (
        Need("execution", lambda c: c.execution != Execution.cuda_graph, "eager or compile: masks of samples come from the host"),
        Need("workload.dropout", lambda c: c.workload.dropout > 0, "a positive probability: there is nothing else that draws"),
    ),
    Study.loss_scaling: (
        Need("precision", lambda c: c.precision == Precision.float16, "float16: the others have no loss scale"),
    ),
    Study.negatives: (
        Need("precision", lambda c: c.precision == Precision.float64, "float64: it is about exact differences"),
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.retrieval: (
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.method_memory: (
        _EQUAL_SPLIT,
        Need("workload.data", lambda c: c.workload.data == Data.docstrings, "docstrings: pairs of queries and passages"),
    ),
    Study.replicas: (
        Need("device", lambda c: c.device != Device.cuda, "cpu: the ranks are processes with gloo between them"),
    ),
}  # fmt: skip


def value_of(config: Any, name: str) -> Any:
    """The value of the field of that dotted name; None where there is no such field."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def validate(config: TrialConfig) -> None:
    """Raise `ConfigError` at the first setting that cannot be run.

    What depends on the data (a micro-batch of one sample under BatchNorm, say) is checked where the data is known.
    """
    _check_bounds(config)
    _check_targets(config)
    if config.workload.data == Data.custom:
        _check_custom(config)
    else:
        _check_workload(config)
    _check_windows(config)
    if config.optimizer.name == OptimizerName.nesterov and config.optimizer.momentum == 0:
        raise ConfigError("optimizer.momentum", 0, "a positive momentum with nesterov")
    for need in NEEDS.get(config.study, ()):
        need.check(config)


def _check_bounds(config: TrialConfig) -> None:
    """Every number that there is, against the table; `null` is the absence of one."""
    for name, bounds in BOUNDS.items():
        value = value_of(config, name)  # None of `workers`, which is no setting of a trial
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not bounds.hold(number):
                raise ConfigError(name, number, str(bounds))


def _check_targets(config: TrialConfig) -> None:
    """A target where the user's own code is asked for, and nowhere else."""
    for name, own, is_custom in (
        ("workload", config.workload, config.workload.data == Data.custom),
        ("optimizer", config.optimizer, config.optimizer.name == OptimizerName.custom),
    ):
        if is_custom:
            place, _, attribute = (own.target or "").rpartition(":")
            if not (place and attribute.isidentifier()):
                raise ConfigError(f"{name}.target", own.target or "null", "FILE.py:NAME or package.module:NAME")
            for key, value in own.args.items():
                if not is_plain(value):
                    raise ConfigError(f"{name}.args.{key}", value, "text, a finite number, true, false, null, or lists of these")
        else:
            for key, value in (("target", own.target), ("args", own.args or None), ("source", own.source)):
                if value is not None:
                    raise ConfigError(f"{name}.{key}", value, f"nothing without {name}=custom")


def is_plain(value: Any) -> bool:
    """Whether a value is one that JSON has, NaN and infinities left out."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _check_custom(config: TrialConfig) -> None:
    """The settings of our own models mean nothing to a task."""
    for name in ("model", "width", "depth", "dropout"):
        if getattr(config.workload, name) != getattr(WorkloadConfig(), name):
            raise ConfigError(
                f"workload.{name}", getattr(config.workload, name), "nothing with workload=custom: use workload.args"
            )
    if config.data.root is not None:
        raise ConfigError("data.root", config.data.root, "null with workload=custom: the task knows where its data are")
    if config.execution == Execution.cuda_graph:
        raise ConfigError("execution", config.execution, "eager or compile with workload=custom")


def _check_workload(config: TrialConfig) -> None:
    workload = config.workload
    scheme, is_address, _ = (config.data.root or "").partition("://")
    if is_address:  # which may hold a password, and settings are stored, logged and shown: not even here
        raise ConfigError("data.root", f"{scheme}://...", "a local folder, never an address")
    if config.norm == Norm.as_is:
        raise ConfigError("norm", config.norm, f"none, batch, group or layer with workload.data={workload.data}")
    if (workload.model == Model.transformer) != (workload.data in TEXTS) or (workload.model == Model.conv1d) != (
        workload.data == Data.mnist1d
    ):
        raise ConfigError("workload.model", workload.model, f"a model for {workload.data} data")
    if workload.data in TEXTS and config.norm not in (Norm.layer, Norm.none):
        raise ConfigError("norm", config.norm, f"layer or none with workload={workload.data}")
    if (workload.model == Model.towers) != (workload.data == Data.docstrings):
        raise ConfigError(
            "workload.model",
            workload.model,
            f"{'towers' if workload.data == Data.docstrings else 'a model'} for {workload.data} data",
        )
    if workload.data == Data.docstrings and config.norm != Norm.none:
        raise ConfigError("norm", config.norm, "none with workload=docstrings")
    if workload.data == Data.pairs and workload.model != Model.mlp:
        raise ConfigError("workload.model", workload.model, "mlp for pairs data: two perceptrons, one for each half")
    if workload.data in EMBEDDED and config.data.root is not None:
        raise ConfigError("data.root", config.data.root, f"null with workload.data={workload.data}, which is embedded")
    if workload.data in (Data.mnist, Data.cifar10) and config.data.root is None:
        raise ConfigError("data.root", "null", f"a local folder that holds {workload.data}")


def _check_windows(config: TrialConfig) -> None:
    batch, chosen = config.effective_batch, config.accumulation_steps
    for name, steps in (("steps", config.steps), ("algebra_steps", config.algebra_steps)):
        if (steps or 0) * batch > MOST_WINDOW_SAMPLES:
            raise ConfigError(name, steps, f"at most {MOST_WINDOW_SAMPLES // batch} with effective_batch={batch}")
    if not 0 < len(chosen) <= MOST_ARMS:
        raise ConfigError("accumulation_steps", list(chosen), f"one to {MOST_ARMS} numbers of micro-batches, an arm each")
    if len(config.faults) > MOST_ARMS:
        raise ConfigError("faults", list(config.faults), f"at most {MOST_ARMS} faults, an arm each for every N")
    if len(set(config.methods)) != len(config.methods) or len(config.methods) > MOST_ARMS:
        raise ConfigError("methods", list(config.methods), f"at most {MOST_ARMS} methods, each once")
    if config.methods and config.workload.data not in (Data.docstrings, Data.pairs, Data.custom):
        raise ConfigError(
            "methods", list(config.methods), f"none with workload.data={config.workload.data}: its loss is separable"
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigError("accumulation_steps", list(chosen), "each number once")
    for num in chosen:
        if num > batch:
            raise ConfigError("accumulation_steps", num, f"at most effective_batch={batch}: b would be below 1")
        if config.split == Split.even and batch % num:
            raise ConfigError("accumulation_steps", num, f"a divisor of effective_batch={batch}, or split=ragged")
