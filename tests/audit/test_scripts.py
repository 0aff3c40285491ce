"""Scripts in other people's manner are audited as they are; the verdict is right for each, and for one with a planted fault."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from accumulation_harness.audit.report.frameworks import ADVICE
from tests.audit.asked import everything
from tests.commands import ENVIRONMENT

SCRIPTS = Path(__file__).parent / "scripts"
FLAGS = "--batch-size {batch_size} --gradient-accumulation-steps {accumulation_steps}"
HF = "--per_device_train_batch_size {batch_size} --gradient_accumulation_steps {accumulation_steps}"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script, how it is told the numbers, and a fault: a text, what takes its place, and the names that it must get."""

    target: str
    words: Sequence[str]
    old: str
    new: str
    cause: str
    file: str = ""  # of the fault, if it is not the target
    needs: Sequence[str] = ()
    framework: str = ""  # whose advice for the cause is what the right script does

    @property
    def name(self):
        return self.file or self.target.partition(":")[0]

    @property
    def source(self):
        return next(path for folder in (SCRIPTS, SCRIPTS / "nano") if (path := folder / self.name).is_file()).read_text()

    def plant(self, folder):
        file = folder / self.name
        assert file.read_text().count(self.old) == 1
        file.write_text(file.read_text().replace(self.old, self.new))


TRAINER = {
    "words": ["--set", f"{HF} --max_steps 4", "--", "--output_dir", "out", "--use_cpu", "--report_to", "wandb"],
    "needs": ["transformers", "accelerate"],
    "framework": "transformers",
}
ACCELERATE = {"target": "by_accelerate.py", "words": ["--set", HF], "needs": ["accelerate"], "framework": "accelerate"}
LIGHTNING = {
    "target": "by_lightning.py",
    "words": [
        "--set=--data.batch_size {batch_size} --trainer.accumulate_grad_batches {accumulation_steps}",
        *("--", "fit", "--trainer.max_epochs", "2", "--trainer.accelerator", "cpu"),
    ],
    "needs": ["lightning", "jsonargparse"],
    "framework": "lightning",
}


def in_file(file, batch, accumulate):
    """That two values in a file are the numbers."""
    return [f"--set-file={file}:{batch}={{batch_size}}", f"--set-file={file}:{accumulate}={{accumulation_steps}}"]


CASES = {
    "module-level code, globals and a configurator": Case(
        target="train.py",
        words=[
            "--set=--batch_size={batch_size} --gradient_accumulation_steps={accumulation_steps}",
            *("--", "config/small.py", "--learning_rate=0.01"),
        ],
        old="loss = loss / gradient_accumulation_steps",
        new="pass",
        cause="loss_not_divided",
        framework="torch",
    ),
    "argparse": Case(
        target="by_argparse.py",
        words=["--set", FLAGS, "--", "--epochs", "2"],
        old="                scheduler.step()\n",
        new="            scheduler.step()\n",
        cause="schedule_per_micro_batch",
        framework="torch",
    ),
    "HfArgumentParser": Case(
        target="by_dataclasses.py",
        words=["--set", f"{HF} --max_steps 4"],
        old="/ num_items_in_batch).backward()",
        new="/ (labels[rows] != -100).sum() / len(window)).backward()",
        cause="mean_of_means",
        needs=["transformers"],
        framework="torch",
    ),
    "hydra": Case(
        target="by_hydra.py",
        words=["--set=trainer.batch_size={batch_size} trainer.accumulate_grad_batches={accumulation_steps}", "--", "seed=3"],
        old="                optimizer.zero_grad()\n",
        new="            optimizer.zero_grad()\n",
        cause="gradients_cleared_in_window",
        needs=["hydra"],
        framework="torch",
    ),
    "a YAML file that it reads": Case(
        target="by_file.py",
        words=in_file("conf/train.yaml", "trainer.batch_size", "trainer.accumulate_grad_batches"),
        old=f"        if (start // batch + 1) % accumulate == 0:\n    {CLIP}",
        new=f"{CLIP}        if (start // batch + 1) % accumulate == 0:\n",
        cause="clip_per_micro_batch",
        framework="torch",
    ),
    "variables of the environment, the whole batch, no seed": Case(
        target="by_environment.py",
        words=["--set-env=BATCH_SIZE={total_batch} GRAD_ACCUM={accumulation_steps}"],
        old="for rows in window.split(micro_batch):",
        new="for rows in [window[:micro_batch]] * GRAD_ACCUM:",
        cause="samples_repeated",
    ),
    "constants, and a method": Case(
        target="by_constants.py:Trainer.fit",
        words=in_file("by_constants.py", "Config.BATCH", "Config.ACCUMULATE"),
        old="if k % Config.ACCUMULATE == 0:",
        new="if True:",
        cause="step_every_micro_batch",
    ),
    "a module of a package": Case(
        target="package.train",
        words=["--set", "--micro-batch {batch_size} --accumulate {accumulation_steps}"],
        file="package/train.py",
        old="            optimizer.zero_grad()\n",
        new="",
        cause="gradients_not_cleared",
        needs=["typer"],
        framework="torch",
    ),
    "a function of a module": Case(
        target="package.train:train",
        words=[],
        file="package/steps.py",
        old="for part in torch.arange(rows).split(micro_batch * accumulate)",
        new="for part in torch.arange(rows).split(micro_batch * accumulate)[: -1 if accumulate > 1 else None]",
        cause="window_misplaced",
        needs=["typer"],
    ),
    "fire": Case(
        target="by_fire.py",
        words=["--set", "--batch_size={total_batch} --micro_batch_size={batch_size}"],
        old="(loss / gradient_accumulation_steps)",
        new="(loss / gradient_accumulation_steps**2)",
        cause="loss_divided_twice",
        needs=["fire"],
        framework="torch",
    ),
    "accelerate": Case(
        **ACCELERATE,
        old="accelerator.backward(loss)",
        new="accelerator.backward(loss / args.gradient_accumulation_steps)",
        cause="loss_divided_twice",
    ),
    "a model that ignores the token count": Case(
        target="by_classifier.py",
        **TRAINER,
        old="    trainer.model_accepts_loss_kwargs = False\n",
        new="",
        cause="loss_not_divided",
    ),
    "compute_loss of one's own": Case(
        target="by_own_loss.py",
        **TRAINER,
        old="loss = cross_entropy(logits, labels, reduction='sum') / num_items_in_batch",
        new="loss = cross_entropy(logits, labels)",
        cause="mean_of_means+loss_not_divided",
    ),
    "TRL": Case(
        target="by_trl.py",
        words=[*TRAINER["words"], "--bf16", "false", "--gradient_checkpointing", "false"],
        old=", reduction='sum') / num_items_in_batch  # fmt: skip",
        new=")",
        cause="mean_of_means+loss_not_divided",
        needs=["trl"],
        framework="trl",
    ),
    "DeepSpeed": Case(
        target="by_deepspeed.py",
        words=[
            *in_file("ds_config.json", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            "--set-env=RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29561",
            *("--", "--deepspeed", "--deepspeed_config", "ds_config.json"),
        ],
        old="engine.backward(loss)",
        new="engine.backward(loss / accumulate)",
        cause="loss_divided_twice",
        needs=["deepspeed"],
        framework="deepspeed",
    ),
    "Keras": Case(
        target="by_keras.py",
        words=["--set", "--batch_size {batch_size} --gradient_accumulation_steps {accumulation_steps}"],
        old='reduction="sum_over_batch_size"',
        new='reduction="sum"',
        cause="loss_divided_twice",
        needs=["keras"],
        framework="keras",
    ),
    "accelerate, clipped": Case(
        **ACCELERATE,
        old="if accelerator.sync_gradients:",
        new="if True:",
        cause="clip_per_micro_batch",
    ),
    "accelerate, with a schedule": Case(
        **ACCELERATE,
        old="loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
        new="loader = accelerator.prepare(model, optimizer, loader)",
        cause="schedule_per_micro_batch",
    ),
    "LightningCLI": Case(
        **LIGHTNING,
        old="        return loss\n",
        new="        return loss * self.trainer.accumulate_grad_batches\n",
        cause="loss_not_divided",
    ),
    "LightningCLI, divided": Case(
        **LIGHTNING,
        old="        return loss\n",
        new="        return loss / self.trainer.accumulate_grad_batches\n",
        cause="loss_divided_twice",
    ),
    "a notebook": Case(
        target="notebook.ipynb",
        words=in_file("notebook.ipynb", "Config.BATCH", "Config.ACCUMULATE"),
        old="loss.backward()",
        new="(loss * Config.ACCUMULATE).backward()",
        cause="loss_not_divided",
    ),
    "DDP": Case(
        target="by_ddp.py",
        words=["--processes=2", "--set", "--batch-size {batch_size} --accumulate {accumulation_steps}"],
        old="/ args.accumulate).backward()",
        new=").backward()",
        cause="loss_not_divided",
    ),
}


FAST = "argparse"  # its right half is like the README's


@pytest.fixture
def home(tmp_path, request):
    """The user's folder, with data, and a checkpoint and logs of earlier runs."""
    folder = tmp_path / "home"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SCRIPTS / "nano", folder, dirs_exist_ok=True)
    (folder / "data").mkdir()
    for name in ("train", "val"):
        np.random.default_rng(0).integers(32, size=999, dtype=np.uint16).tofile(folder / "data" / f"{name}.bin")
    (folder / "data" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 32}))
    code = (folder / "by_constants.py").read_text().splitlines(keepends=True)
    cells = [
        {"cell_type": "markdown", "source": ["# Training"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", *code]},
    ]
    (folder / "notebook.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    for written in ("out/ckpt.pt", "checkpoints/last.pt", "last.pt", "out/model.safetensors"):
        (folder / written).parent.mkdir(exist_ok=True)
        (folder / written).write_text("precious")
    return folder


def run(command, home):
    environment = {name: value for name, value in (os.environ | ENVIRONMENT).items() if not name.startswith("WANDB")}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def audit(home, *words):
    return run([sys.executable, "-m", "accumulation_harness", "audit", *words], home)


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        pytest.param(
            kind,
            planted,
            id=f"{kind}-{'wrong' if planted else 'right'}",
            marks=[pytest.mark.slow] * (kind != FAST or not planted),
        )
        for kind in CASES
        for planted in (False, True)
    ],
)
def test_a_script_as_it_is(kind, planted, home):
    case = CASES[kind]
    if missing := [name for name in case.needs if find_spec(name) is None]:
        pytest.skip(f"needs {missing}")
    if planted:
        case.plant(home)
    before = everything(home)
    sizes = ["--batch-size", "32", "--accumulation-steps", "4", "--format", "json"]
    code, out, err = audit(home, case.target, *sizes, *case.words)
    told = json.loads(out) if out else {}
    assert (code, told.get("verdict")) == ((1, "different") if planted else (0, "equivalent")), out + err
    assert {finding["cause"] for finding in told["findings"]} == ({*case.cause.split("+")} if planted else set()), out
    assert everything(home) == before, "what was there is as it was, and nothing else is"
    if planted and case.framework:
        assert f"With {case.framework}: " in told["findings"][0]["change"]


def test_what_is_advised_for_a_framework_is_what_a_right_script_does():
    named = [(case, cause) for case in CASES.values() if case.framework for cause in case.cause.split("+")]
    tested = {(case.framework, cause): case.old.strip() for case, cause in named}
    advised = {(framework, cause): text for framework, known in ADVICE.items() for cause, text in known.items()}
    assert tested.keys() == advised.keys()
    for key, line in tested.items():
        said = re.findall("`([^`]+)`", advised[key])
        assert any(code in line for code in said), (line, said)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True], ids=["right", "wrong"])
def test_a_script_that_torchrun_starts(planted, home):
    if planted:
        CASES["DDP"].plant(home)
    before = everything(home)
    words = ["--set", "--batch-size {batch_size} --accumulate {accumulation_steps}", "--launched", "--format", "json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "accumulation_harness.audit"]
    code, out, err = run([*torchrun, "by_ddp.py", "--batch-size", "32", "--accumulation-steps", "4", *words], home)
    causes = {finding["cause"] for finding in json.loads(out)["findings"]}
    assert (code, causes) == ((1, {"loss_not_divided"}) if planted else (0, set())), out + err
    assert everything(home) == before
