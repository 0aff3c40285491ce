"""Ultralytics' trainers with the nominal batch `nbs`: micro-batches of b are added until nbs rows were seen; warmup off."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from ultralytics.models.yolo.classify import ClassificationTrainer
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import ClassificationModel, DetectionModel
from ultralytics.utils import LOGGER

from scoreboard import data

warnings.simplefilter("ignore")
LOGGER.setLevel("ERROR")
SIDE = 64
BACKBONE = [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]]
CLASSIFIER = {"nc": data.CLASSES, "backbone": BACKBONE, "head": [[-1, 1, "Classify", [data.CLASSES]]]}
DETECTOR = {"nc": 2, "backbone": BACKBONE, "head": [[[1, 2], 1, "Detect", [2]]]}


class InMemory:
    """Rows from memory in their order, and no validation: all of it by methods that are there to be overridden."""

    rows = 32

    def get_dataset(self) -> dict[str, Any]:
        return {"train": "", "val": "", "nc": data.CLASSES, "names": dict(enumerate("abcd")), "channels": 3}

    def get_validator(self) -> Any:
        class Nothing:
            class metrics:
                keys: list[str] = []  # noqa: RUF012

        return Nothing

    def validate(self) -> tuple[dict[str, float], None]:
        return {}, None

    def save_model(self) -> bool:
        return False

    def final_eval(self) -> None:
        return None

    def set_class_weights(self) -> None:
        return None


def _images(rows: int) -> Tensor:
    return torch.randn(rows, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


class Classification(InMemory, ClassificationTrainer):  # type: ignore[misc]
    def get_dataloader(self, path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
        rows = TensorDataset(_images(self.rows), data.images()[1][: self.rows])

        def collate(items: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            return {"img": torch.stack([x for x, _ in items]), "cls": torch.stack([y for _, y in items])}

        return DataLoader(rows, batch_size, collate_fn=collate)


class Detection(InMemory, DetectionTrainer):  # type: ignore[misc]
    """One to five boxes in each image."""

    def get_dataloader(self, path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
        generator = torch.Generator().manual_seed(2)
        images = (_images(self.rows).sigmoid() * 255).to(torch.uint8)
        around = torch.tensor([0.5, 0.5, 0.8, 0.8])
        boxes = [around + 0.2 * torch.rand(1 + row % 5, 4, generator=generator) for row in range(self.rows)]

        def collate(items: list[int]) -> dict[str, Any]:
            counts = torch.tensor([len(boxes[item]) for item in items])
            return {
                "img": images[items],
                "bboxes": torch.cat([boxes[item] for item in items]),
                "cls": (torch.cat([boxes[item][:, :1] for item in items]) > 0.6).float(),
                "batch_idx": torch.repeat_interleave(torch.arange(len(items)), counts).float(),
            }

        return DataLoader(range(self.rows), batch_size, collate_fn=collate)  # type: ignore[arg-type]


def _grouped(model: nn.Module) -> nn.Module:
    """GroupNorm in place of BatchNorm."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    return model


def _train(kind: Any, model: Any, batch_size: int, accumulation_steps: int, rows: int = 32, **settings: Any) -> None:
    settings = {"warmup_epochs": 0.0, "weight_decay": 0.0, "optimizer": "SGD", "lr0": 0.01} | settings
    with tempfile.TemporaryDirectory() as folder:
        fixed: dict[str, Any] = {"project": folder, "model": "tiny.yaml", "device": "cpu", "close_mosaic": 0}
        fixed |= dict.fromkeys(("amp", "val", "plots", "save"), False)
        fixed |= {"epochs": data.EPOCHS, "batch": batch_size, "nbs": batch_size * accumulation_steps, "imgsz": SIDE}
        trainer = kind(overrides=fixed | settings)
        trainer.rows, trainer.model = rows, model
        trainer.train()


def _classifier() -> Any:
    torch.manual_seed(0)
    return ClassificationModel(dict(CLASSIFIER), ch=3, nc=data.CLASSES, verbose=False)


def _detector() -> Any:
    torch.manual_seed(0)
    return DetectionModel(dict(DETECTOR), ch=3, nc=2, verbose=False)


def classify(batch_size: int, accumulation_steps: int) -> None:
    """`ClassificationTrainer`, GroupNorm in place of BatchNorm, divisible."""
    _train(Classification, _grouped(_classifier()), batch_size, accumulation_steps)


def classify_divided(batch_size: int, accumulation_steps: int) -> None:
    """`ClassificationTrainer`, GroupNorm, a loss that is divided by `nbs / batch`, divisible."""
    model = _grouped(_classifier())
    loss = model.init_criterion()
    model.criterion = lambda predicted, batch: (loss(predicted, batch)[0] / accumulation_steps, loss(predicted, batch)[1])
    _train(Classification, model, batch_size, accumulation_steps)


def classify_batch_norm(batch_size: int, accumulation_steps: int) -> None:
    """`ClassificationTrainer`, BatchNorm, divisible."""
    _train(Classification, _classifier(), batch_size, accumulation_steps)


def classify_warmup(batch_size: int, accumulation_steps: int) -> None:
    """`ClassificationTrainer`, GroupNorm, one epoch of warmup, divisible."""
    _train(Classification, _grouped(_classifier()), batch_size, accumulation_steps, warmup_epochs=1.0)


def detect(batch_size: int, accumulation_steps: int) -> None:
    """`DetectionTrainer`, GroupNorm, one to five boxes per image, divisible."""
    _train(Detection, _grouped(_detector()), batch_size, accumulation_steps)


def detect_remainder(batch_size: int, accumulation_steps: int) -> None:
    """`DetectionTrainer`, GroupNorm, one to five boxes per image, a remainder."""
    _train(Detection, _grouped(_detector()), batch_size, accumulation_steps, rows=40)


def detect_batch_norm(batch_size: int, accumulation_steps: int) -> None:
    """`DetectionTrainer`, BatchNorm, divisible."""
    _train(Detection, _detector(), batch_size, accumulation_steps)
