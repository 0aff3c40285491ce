"""Trainers of other packages, where they are installed: watched right and wrong, and bit by bit beside unwatched ones."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the trainers' own
]


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def _example():
    path = Path(__file__).parents[2] / "examples" / "watched_trainer.py"
    spec = importlib.util.spec_from_file_location("watched_trainer", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_example_of_a_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    example = _example()
    report, model = example.watched("right")
    assert report.checked["replays"] == 1, str(report)
    assert _equal(model, example.train(example.Trainer, [], str(tmp_path)))
    assert _equal(example.watched("mean")[1], example.train(example.Mean, [], str(tmp_path)))


@pytest.mark.parametrize("ends", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_a_training_that_ends_early_leaves_its_report_and_nothing_else(kind, ends, tmp_path):
    pytest.importorskip("accelerate" if kind == "transformers" else "lightning")
    before, path, steps = (torch.autograd.backward, functional.cross_entropy), tmp_path / "run.json", []

    def count(*_):
        steps.append(1)
        if len(steps) == 3:
            assert torch.autograd.backward is not before[0] and json.loads(path.read_text())["windows"]
            raise ends

    handle = register_optimizer_step_pre_hook(count)
    try:
        with pytest.raises((ends, SystemExit)):
            if kind == "transformers":
                from accumulation_harness.watch.callbacks.hf import WatchCallback

                example = _example()
                example.train(example.Trainer, [WatchCallback(path, tell=None)], str(tmp_path))
            else:
                _lightning({"path": path})
    finally:
        handle.remove()
    assert (torch.autograd.backward, functional.cross_entropy) == before
    assert json.loads(path.read_text())["windows"]


def _lightning(watched, *, factor=1.0, manual=False):
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from accumulation_harness.watch.callbacks.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.automatic_optimization = not manual

        def loss(self, batch):
            return functional.cross_entropy(self.head(self.body(batch[0]).tanh()), batch[1])

        def training_step(self, batch, index):
            if not manual:
                return factor * self.loss(batch)
            self.manual_backward(self.loss(batch) / (4 / factor))
            if index % 4 == 3:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return None

        def configure_optimizers(self):
            one = torch.optim.AdamW(self.body.parameters() if manual else self.parameters(), lr=1e-2)
            return [one, torch.optim.SGD(self.head.parameters(), lr=1e-2)] if manual else one

    torch.manual_seed(0)
    module = Module()
    data = DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))), batch_size=4)
    callback = None if watched is None else WatchCallback(tell=None, **watched)
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback] if callback else [], accumulate_grad_batches=1 if manual else 4,
    ).fit(module, data)  # fmt: skip
    return callback, module


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_with_a_replay_and_with_several_optimizers(manual):
    pytest.importorskip("lightning")
    options = {"accumulation_steps": 4} if manual else {"loss": lambda module, batch: module.loss(batch)}
    callback, module = _lightning(options, manual=manual)
    report = callback.report()
    assert report.verdict == "equivalent" and report.checked["replays"] == (not manual), str(report)
    assert report.micro_batches == {4: 16 if manual else 8}
    assert _equal(module, _lightning(None, manual=manual)[1])
    wrong, module = _lightning(options, factor=4.0, manual=manual)
    assert wrong.report().causes == ("loss_not_divided",), str(wrong.report())
    assert _equal(module, _lightning(None, factor=4.0, manual=manual)[1])


@pytest.mark.parametrize("kind", ["right", "bfloat16", "mean"])
def test_the_trainer_of_trl(kind, tmp_path):
    """Its loss is computed in pieces, where no head is seen: the ledger does not judge it, and the replay does."""
    pytest.importorskip("trl")
    import datasets
    import transformers
    from trl import SFTConfig

    from accumulation_harness.watch.callbacks.hf import WatchCallback
    from scoreboard import plain_run, text, trl_trainer

    class Mean(trl_trainer.Ordered):
        def compute_loss(self, model, inputs, *_, **__):
            return model(**inputs).loss

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        summed = functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        return summed, (batch["labels"] != -100).sum()  # as the trainer counts, with the first token, which nothing predicts

    def train(callbacks):
        settings = plain_run.settings(str(tmp_path), 4, 4, bf16=kind == "bfloat16")
        trainer = (Mean if kind == "mean" else trl_trainer.Ordered)(
            model=trl_trainer._gpt2(),
            args=SFTConfig(**settings, gradient_checkpointing=False),
            train_dataset=datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in text.rows()]),
            processing_class=trl_trainer._tokenizer(),
            callbacks=callbacks,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return trainer.model

    callback = WatchCallback(loss=loss, tell=None)
    model = train([callback])
    report = callback.report()
    if kind == "mean":
        assert report.verdict == "different" and "mean_of_means" in report.causes, str(report)
    else:
        assert report.verdict == "equivalent" and report.checked["replays"] == 1, str(report)
    assert _equal(model, train([]))


# Of the golden table: name -> the package that it needs, and what gives its reports.
REPORTS = {f"transformers, {kind}": ("accelerate", lambda kind=kind: [_example().watched(kind)[0]]) for kind in ("right", "mean")}
