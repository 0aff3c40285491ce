"""Runs of transformers, TRL, Lightning and accelerate under watch, right and wrong, on tiny models with nothing downloaded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset, disable_progress_bars
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

from accumulation_harness.watch import Report, watch
from accumulation_harness.watch.callbacks import hf
from accumulation_harness.watch.callbacks import lightning as by_lightning
from accumulation_harness.watch.callbacks.accelerate import watch_prepared
from scoreboard import plain_run, text

N, ROWS, EVEN = 4, 3, 36  # micro-batches of a window, their rows, rows of which every window is full
SIZES = {
    "vocab_size": text.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

logging.disable(logging.WARNING)
disable_progress_bars()
transformers.utils.logging.disable_progress_bar()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def scored() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, num_labels=1, pad_token_id=text.PAD)
    return transformers.LlamaForSequenceClassification(config)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForSequenceClassification(config)


# -- transformers ------------------------------------------------------------------------------------------------------


class Mean(Trainer):
    """The mean over each micro-batch's own tokens, which the trainer takes for a share of the window's."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return model(**inputs).loss


class Shares(Mean):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        return model(**inputs).loss / self.args.gradient_accumulation_steps


class Twice(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().compute_loss(*args, **kwargs) / self.args.gradient_accumulation_steps


class Summed(Trainer):
    """A loss of one's own, over all labels of the window."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


class ByHand(Trainer):
    """A masked likelihood by hand, over all labels of the window."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        labels = inputs.pop("labels")[:, 1:]
        logs = model(**inputs).logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return -(logs * (labels >= 0)).sum() / num_items_in_batch


class Halved(Trainer):
    """Class weights of the micro-batch's own."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        labels = inputs.pop("labels")
        return functional.cross_entropy(model(**inputs).logits, labels, weight=torch.tensor([1.0, 3.0]))


class Clipped(Trainer):
    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss


class Advanced(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.lr_scheduler.step()
        return loss


class Cleared(Trainer):
    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        model.zero_grad()
        return super().training_step(model, *args, **kwargs)


def by_transformers(
    kind: type[Trainer] = Trainer, *, rows: Any = None, model: Callable[[], nn.Module] = llama, **others: Any
) -> Report:
    callback = hf.WatchCallback(tell=None, rows_apart=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = plain_run.settings(
            folder,
            ROWS,
            N,
            remove_unused_columns=False,
            **{"learning_rate": 1e-3, "optim": "adamw_torch", "max_grad_norm": 1.0, **others},
        )
        trainer = kind(
            model=model(), args=transformers.TrainingArguments(**settings), train_dataset=rows or text.causal(44),
            data_collator=text.collate, callbacks=[callback],
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return callback.report()


def divided(model: Callable[[], nn.Module] = bert) -> nn.Module:
    """A head that is told to leave the division to the trainer."""
    made = model()
    made.accepts_loss_kwargs = False
    return made


# -- TRL ---------------------------------------------------------------------------------------------------------------


def words(number: int, length: int) -> str:
    return " ".join(f"t{1 + (7 * number + 5 * k) % (text.VOCABULARY - 1)}" for k in range(length))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"<pad>": 0, **{f"t{i}": i for i in range(1, text.VOCABULARY)}}, unk_token="t1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="t1", unk_token="t1")


PAIRS = [
    {"prompt": words(i, 3), "chosen": " " + words(i + 1, 3 + i % 7), "rejected": " " + words(i + 2, 2 + i % 5)}
    for i in range(EVEN)
]
PROMPTS = [{"prompt": words(i, 4)} for i in range(EVEN)]


def reward(completions: Any, **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def once_more(base: type[Trainer]) -> type[Trainer]:
    """A subclass whose loss is that of the trainer over N."""

    class Twice(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().compute_loss(*args, **kwargs) / N

    return Twice


def undivided(base: type[Trainer]) -> type[Trainer]:
    """A subclass that takes every micro-batch for a window."""

    class Undivided(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
            self.current_gradient_accumulation_steps = 1
            return super().compute_loss(*args, **kwargs)

    return Undivided


def of_itself(base: type[Trainer]) -> type[Trainer]:
    """A subclass that divides every micro-batch by its own labels."""

    class OfItself(base):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            return super().compute_loss(model, inputs)

    return OfItself


def by_trl(name: str, wrong: Callable[[type[Trainer]], type[Trainer]] = lambda base: base, **others: Any) -> Report:
    callback, model = hf.WatchCallback(tell=None, rows_apart=True), scored() if name == "Reward" else llama()
    given: dict[str, Any] = {"processing_class": tokenizer(), "train_dataset": Dataset.from_list(PAIRS)}
    if name == "SFT":
        given["train_dataset"] = Dataset.from_list([{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS])
    if name == "GRPO":
        given |= {"train_dataset": Dataset.from_list(PROMPTS), "reward_funcs": reward}
        others = {"num_generations": 3, "max_completion_length": 8, "temperature": 1.0, "num_train_epochs": 1, **others}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # trainers with a reference model load it
        model.config._name_or_path = folder
        settings = plain_run.settings(folder, ROWS, N, **{"bf16": False, "gradient_checkpointing": False, **others})
        config = getattr(trl, f"{name}Config")(**settings)
        trainer = wrong(getattr(trl, f"{name}Trainer"))(model=model, args=config, callbacks=[callback], **given)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return callback.report()


# -- Lightning, Fabric and accelerate ----------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))


def loader(rows: int = EVEN) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(45, 12, generator=draw), torch.randint(0, 4, (45,), generator=draw)
    return DataLoader(TensorDataset(x[:rows], y[:rows]), ROWS)


class Module(lightning.LightningModule):
    def __init__(self, factor: float = 1.0, divisor: int = 1, advances: bool = False) -> None:
        super().__init__()
        self.model, self.factor, self.divisor, self.advances = perceptron(), factor, divisor, advances

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        if self.advances:
            self.lr_schedulers().step()
        return loss * self.factor / self.divisor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class Manual(lightning.LightningModule):
    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.model, self.wrong, self.automatic_optimization = perceptron(), wrong, False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        if self.wrong == "cleared":
            optimizer.zero_grad()
        self.manual_backward(functional.cross_entropy(self.model(batch[0]), batch[1]) / (1 if self.wrong == "undivided" else N))
        if self.wrong == "clipped":
            self.clip_gradients(optimizer, 0.05, "norm")
        if (index + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Adversaries(lightning.LightningModule):
    def __init__(self, divisor: int = N) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.critic, self.divisor, self.automatic_optimization = nn.Linear(4, 12), perceptron(), divisor, False

    def told(self, x: Tensor, is_real: bool) -> Tensor:
        found = self.critic(x)[:, 0]
        return functional.binary_cross_entropy_with_logits(found, torch.full_like(found, float(is_real)))

    def training_step(self, batch: Any, index: int) -> None:
        makers, critics = self.optimizers()
        made = self.maker(torch.randn(len(batch[0]), 4))
        self.manual_backward((self.told(batch[0], True) + self.told(made.detach(), False)) / self.divisor)
        self.toggle_optimizer(makers)
        self.manual_backward(self.told(made, True) / N)
        self.untoggle_optimizer(makers)
        if (index + 1) % N == 0:
            for optimizer in (critics, makers):
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.maker.parameters(), 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-2)


def by_trainer(module: lightning.LightningModule, rows: int = EVEN, **others: Any) -> Report:
    callback = by_lightning.WatchCallback(tell=None)
    manual = not module.automatic_optimization
    lightning.Trainer(
        max_epochs=3, accumulate_grad_batches=1 if manual else N, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", callbacks=[callback], **others,
    ).fit(module, loader(rows))  # fmt: skip
    return callback.report()


def by_fabric(wrong: str = "", max_norm: float = 0.0) -> Report:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    inner = perceptron()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), 0.1, momentum=0.9))
    data = fabric.setup_dataloaders(loader())
    with watch(model, optimizer, tell=None) as seen:
        for _ in range(3):
            for k, (x, y) in enumerate(data, start=1):
                with fabric.no_backward_sync(model, enabled=k % N > 0):
                    fabric.backward(functional.cross_entropy(model(x), y) / (1 if wrong == "undivided" else N))
                if wrong == "clipped" or (max_norm and k % N == 0):
                    fabric.clip_gradients(model, optimizer, max_norm=max_norm or 0.05)
                if k % N == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return seen.report()


def by_accelerate(wrong: str = "", rows: int = EVEN, max_norm: float = 0.0, **others: Any) -> Report:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=N, cpu=True, **others)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 20)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, loader(rows), schedule)
    with watch_prepared(accelerator, model, optimizer, tell=None) as seen:
        for _ in range(3):
            for x, y in data:
                with accelerator.accumulate(model):
                    loss = functional.cross_entropy(model(x), y)
                    accelerator.backward(loss / N if wrong == "twice" else loss)
                    if wrong == "clipped" and not accelerator.sync_gradients:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                    if max_norm and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    stepping = optimizer.optimizer if wrong == "stepped" else optimizer
                    stepping.step()
                    schedule.step()
                    stepping.zero_grad()
                    if wrong == "cleared":
                        for p in model.parameters():
                            p.grad = None
    return seen.report()


# -- the runs ----------------------------------------------------------------------------------------------------------

Run = tuple[str, str, str, Callable[[], Report]]  # the package, what is run, what is wrong with it, the run
MEANS, TWICE, UNDIVIDED = "mean_of_means", "loss_divided_twice", "loss_not_divided"
CLEARED, CLIPPED, SHORT = "gradients_cleared_in_window", "clip_per_micro_batch", "short_window_divided_by_n"
ADVANCED, STEPPED = "schedule_per_micro_batch", "step_every_micro_batch"
RUNS: Sequence[Run] = (
    ("transformers", "Llama, unequal lengths, short windows", "", by_transformers),
    ("transformers", "Llama in bfloat16", "", lambda: by_transformers(bf16=True)),
    ("transformers", "Llama, label smoothing", "", lambda: by_transformers(label_smoothing_factor=0.1)),
    ("transformers", "Llama, gradient checkpointing", "", lambda: by_transformers(gradient_checkpointing=True)),
    ("transformers", "Llama, Adafactor", "", lambda: by_transformers(optim="adafactor")),
    ("transformers", "Llama, rows grouped by length", "", lambda: by_transformers(train_sampling_strategy="group_by_length")),
    (
        "transformers",
        "own loss: a sum over the labels of the window",
        "",
        lambda: by_transformers(Summed),
    ),
    ("transformers", "own loss: a likelihood by hand", "", lambda: by_transformers(ByHand)),
    (
        "transformers",
        "BERT, division left to the trainer",
        "",
        lambda: by_transformers(rows=text.classified(EVEN), model=divided),
    ),
    ("transformers", "own loss: each micro-batch's mean, not divided", f"{UNDIVIDED}+{MEANS}", lambda: by_transformers(Mean)),
    ("transformers", "own loss: each micro-batch's mean over N", MEANS, lambda: by_transformers(Shares, rows=text.causal(EVEN))),
    ("transformers", "divided by N once more", TWICE, lambda: by_transformers(Twice)),
    ("transformers", "divided by N once more, bfloat16", TWICE, lambda: by_transformers(Twice, bf16=True)),
    (
        "transformers",
        "BERT: the head divides by nothing",
        UNDIVIDED,
        lambda: by_transformers(rows=text.classified(EVEN), model=bert),
    ),
    ("transformers", "clipped after every backward", CLIPPED, lambda: by_transformers(Clipped)),
    (
        "transformers",
        "schedule moved after every backward",
        ADVANCED,
        lambda: by_transformers(Advanced, lr_scheduler_type="linear"),
    ),
    ("transformers", "cleared before every backward", CLEARED, lambda: by_transformers(Cleared)),
    ("trl", "GRPO, loss_type grpo", "", lambda: by_trl("GRPO", loss_type="grpo")),
    ("trl", "GRPO, loss_type grpo, with a divergence", "", lambda: by_trl("GRPO", loss_type="grpo", beta=0.04)),
    ("trl", "GRPO, loss_type dapo", "", lambda: by_trl("GRPO", loss_type="dapo")),
    ("trl", "GRPO, loss_type dr_grpo", "", lambda: by_trl("GRPO", loss_type="dr_grpo")),
    ("trl", "GRPO, loss_type cispo", "", lambda: by_trl("GRPO", loss_type="cispo")),
    ("trl", "GRPO, loss_type luspo", "", lambda: by_trl("GRPO", loss_type="luspo", importance_sampling_level="sequence")),
    ("trl", "DPO", "", lambda: by_trl("DPO")),
    ("trl", "Reward", "", lambda: by_trl("Reward")),
    ("trl", "SFT", "", lambda: by_trl("SFT")),
    ("trl", "GRPO, loss_type bnpo: each micro-batch's mean", MEANS, lambda: by_trl("GRPO", loss_type="bnpo")),
    ("trl", "GRPO, loss_type grpo, not divided by N", UNDIVIDED, lambda: by_trl("GRPO", undivided, loss_type="grpo")),
    (
        "trl",
        "GRPO, loss_type bnpo, not divided by N",
        f"{UNDIVIDED}+{MEANS}",
        lambda: by_trl("GRPO", undivided, loss_type="bnpo"),
    ),
    ("trl", "GRPO, loss_type dapo, divided by N as well", TWICE, lambda: by_trl("GRPO", once_more, loss_type="dapo")),
    ("trl", "DPO, divided by N once more", TWICE, lambda: by_trl("DPO", once_more)),
    ("trl", "SFT, divided by N once more", TWICE, lambda: by_trl("SFT", once_more)),
    ("trl", "SFT, each micro-batch's mean, not divided", f"{UNDIVIDED}+{MEANS}", lambda: by_trl("SFT", of_itself)),
    ("lightning", "automatic", "", lambda: by_trainer(Module())),
    ("lightning", "automatic, clipped", "", lambda: by_trainer(Module(), gradient_clip_val=0.5)),
    ("lightning", "automatic, bfloat16", "", lambda: by_trainer(Module(), precision="bf16-mixed")),
    ("lightning", "manual optimization", "", lambda: by_trainer(Manual())),
    ("lightning", "manual optimization, two optimizers (a GAN)", "", lambda: by_trainer(Adversaries())),
    ("lightning", "an epoch that ends inside a window", SHORT, lambda: by_trainer(Module(), rows=45)),
    ("lightning", "divided by N once more", TWICE, lambda: by_trainer(Module(divisor=N))),
    ("lightning", "multiplied by 1/N, as by a coefficient", TWICE, lambda: by_trainer(Module(1 / N))),
    ("lightning", "schedule moved after every backward", ADVANCED, lambda: by_trainer(Module(advances=True))),
    ("lightning", "manual optimization, not divided", UNDIVIDED, lambda: by_trainer(Manual("undivided"))),
    ("lightning", "manual optimization, clipped after every backward", CLIPPED, lambda: by_trainer(Manual("clipped"))),
    ("lightning", "manual optimization, cleared before every backward", CLEARED, lambda: by_trainer(Manual("cleared"))),
    ("lightning", "manual optimization, a GAN with one loss undivided", UNDIVIDED, lambda: by_trainer(Adversaries(1))),
    ("lightning", "Fabric", "", by_fabric),
    ("lightning", "Fabric, clipped", "", lambda: by_fabric(max_norm=0.5)),
    ("lightning", "Fabric, not divided", UNDIVIDED, lambda: by_fabric("undivided")),
    ("lightning", "Fabric, clipped after every backward", CLIPPED, lambda: by_fabric("clipped")),
    ("accelerate", "accumulate", "", by_accelerate),
    ("accelerate", "accumulate, bfloat16", "", lambda: by_accelerate(mixed_precision="bf16")),
    ("accelerate", "accumulate, clipped", "", lambda: by_accelerate(max_norm=0.5)),
    ("accelerate", "divided by N once more", TWICE, lambda: by_accelerate("twice")),
    ("accelerate", "an epoch that ends inside a window", SHORT, lambda: by_accelerate(rows=45)),
    ("accelerate", "clipped after every backward", CLIPPED, lambda: by_accelerate("clipped")),
    ("accelerate", "the inner optimizer steps", STEPPED, lambda: by_accelerate("stepped")),
    ("accelerate", "cleared after every backward", CLEARED, lambda: by_accelerate("cleared")),
)
