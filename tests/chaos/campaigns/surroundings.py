"""Commands where little is there: no room, no memory, few descriptors, no folder, closed streams, odd locales and variables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

from tests.chaos.campaign import Broken, ask

TINY = (
    "steps=2 algebra_steps=2 accumulation_steps=[2] effective_batch=8 workload.width=2 tracking.mode=disabled workers=1 results=r"
)
LOOP = """\
import torch

def train(batch_size, accumulation_steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randn(3, 16, 4):
        for part in rows.split(batch_size):
            (model(part).square().mean() / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
COMMANDS: Mapping[str, tuple[str, int]] = {  # the command, and how often
    "run": (f"-m accumulation_harness run {TINY}", 6),
    "sweep": (f"-m accumulation_harness run -m seed=0,1 {TINY}", 2),
    "refused": ("-m accumulation_harness run steps=0", 2),
    "status": ("-m accumulation_harness.sweep.status --results r", 4),
    "report": ("-m analysis.report --results r --out o", 3),
    "plan": ("-m accumulation_harness.measure.plan memory=1GB effective_batch=16", 2),
    "audit": ("-m accumulation_harness.audit loop.py:train --batch-size 16 --accumulation-steps 4 --save a.json", 4),
}
BEFORE = (  # in the shell, before the command
    *("ulimit -n 8", "ulimit -n 12", "ulimit -n 20", "ulimit -n 40"),
    *("ulimit -n 64", "ulimit -f 0", "ulimit -f 8", "ulimit -s 256"),
    *("ulimit -v 500000", "ulimit -v 800000", "ulimit -v 2000000", "umask 777", "umask 000", "umask 277"),
    *("mkdir g; cd g; rmdir ../g", "export MPLBACKEND=nonsense"),
    *("mkdir -p 'a b/ü'; cp loop.py 'a b/ü'; cd 'a b/ü'", "mkdir $'\\xff'; cp loop.py $'\\xff'; cd $'\\xff'"),
    *("touch r", "ln -s r r", "ln -s $PWD/not/there r", "ln -s /proc r"),
    *("mkfifo r", "mkdir -p r; touch r/single", "touch o", "ln -s o o"),
    *("mkdir -p r/single/x; touch r/.sweeps", "mkdir o; touch o/figures o/audits", "mkdir a.json", "ln -s /dev/full a.json"),
    *("export TMPDIR=$PWD/not/there",),
    *("export TMPDIR=$PWD/$(printf 'x%.0s' $(seq 110)); mkdir -p $TMPDIR", "touch t; export TMPDIR=$PWD/t"),
    *("export TMPDIR=", "mkdir $'t\\xff'; export TMPDIR=$PWD/$'t\\xff'"),
    *("export TMPDIR=/proc", "unset HOME PATH USER", "export HOME=$PWD/not/there"),
    *("export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", "export LANG=C"),
    *("export LC_ALL=nonsense", "export PYTHONIOENCODING=ascii"),
    *("export PYTHONIOENCODING=latin-1:strict", "export PYTHONIOENCODING=utf-16"),
    *("export PYTHONWARNINGS=error", "export PYTHONOPTIMIZE=2"),
    *("export TERM=dumb", "unset TERM", "export COLUMNS=1"),
    *("export COLUMNS=-1", "export COLUMNS=x", "export TZ=Nowhere/Land", "export TZ="),
    *("export OMP_NUM_THREADS=0", "export OMP_NUM_THREADS=x", "export OMP_NUM_THREADS=10000"),
    *("export MPLCONFIGDIR=$PWD/not/there", "export WANDB_DIR=$PWD/not/there WANDB_MODE=nonsense"),
    *("export PYTHONHASHSEED=1", "export CUDA_VISIBLE_DEVICES=9"),
    *("export SOURCE_DATE_EPOCH=x", "export PYTHONUNBUFFERED=1"),
    *("export PYTHONSAFEPATH=1", "export PYTHONDEVMODE=1", "export PYTHONDONTWRITEBYTECODE=1"),
)  # fmt: skip
AFTER = (
    *("", "", "", "", "> /dev/full", ">&-", "2>&-", ">&- 2>&-", "<&-"),
    *("| true", "2> /dev/full", "> /dev/full 2>&1", "<&- >&- 2>&-"),
)


def attack(rng: Random, folder: Path) -> str:
    """One or two odd surroundings around one command."""
    kinds = list(COMMANDS)
    kind = rng.choices(kinds, [COMMANDS[name][1] for name in kinds])[0]
    before = rng.sample(BEFORE, rng.choice((0, 1, 1, 1, 2)))
    after = rng.choice(AFTER)
    (folder / "loop.py").write_text(LOOP)
    python = shlex.quote(sys.executable)
    script = "; ".join([*before, f"{python} {COMMANDS[kind][0]} {after}", "exit ${PIPESTATUS[0]}"])
    answer = ask(["bash", "-c", script], folder=folder, seconds=150)
    about = f"{kind}: {script}\n{answer}"
    if answer.code and "2>" not in after and not answer.err.strip():
        raise Broken(f"a failure that is not told: {about}")
    if kind == "audit" and answer.code == 1:
        raise Broken(f"blamed: {about}")
    return f"{kind}: {('worked', 'failed', 'refused')[answer.code]}"
