"""Audited files that exit, raise, start threads and processes, kill, close: code 0 only for what was compared and is equal."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from random import Random
from uuid import uuid4

from tests.chaos.campaign import Broken, ask

FILE = """\
import torch
{at_import}

def train(batch_size, accumulation_steps):
    {before}
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for k in range(accumulation_steps):
            rows = x[step * 16 + k * batch_size :][:batch_size]
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean() / {divisor}
            loss.backward()
            {within}
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""
# Each in one line, as it may stand anywhere. What ends the process or the function never leads to code 0.
ENDS = (
    "import sys; sys.exit(0)",
    "import sys; sys.exit(None)",
    "import sys; sys.exit('done')",
    "exit()",
    "import os; os._exit(0)",
    "import os; os.execv('/bin/true', ['true'])",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import os, signal; os.killpg(0, signal.SIGTERM)",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(signal.SIGINT)",
    "import ctypes; ctypes.CDLL(None).exit(0)",
    "import ctypes; ctypes.CDLL(None)._exit(0)",
    "raise KeyboardInterrupt",
    "raise SystemExit(0)",
    "raise GeneratorExit",
    "raise BaseException('all')",
    "raise StopIteration",
    "import asyncio; raise asyncio.CancelledError",
    "raise RecursionError",
    "raise MemoryError",
    "raise ExceptionGroup('both', [ValueError('one'), TypeError('two')])",
    "import _thread, signal; signal.signal(signal.SIGINT, signal.default_int_handler); _thread.interrupt_main()",
)
# These leave the computation as it is: the verdict is the right one, or there is none.
HARMLESS = (
    "pass",
    "import threading, time; threading.Thread(target=time.sleep, args=(900,)).start()",
    "import threading, sys; threading.Thread(target=sys.exit).start()",
    "import threading, os; threading.Thread(target=os._exit, args=(0,)).start()",
    "import subprocess; subprocess.Popen(['sleep', '900'])",
    "import subprocess; subprocess.Popen(['sleep', '900'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    "import os; os.fork()",
    "import os; os.fork() or os._exit(0)",
    "import multiprocessing, time; multiprocessing.get_context('fork').Process(target=time.sleep, args=(900,)).start()",
    "import atexit, os; atexit.register(os._exit, 0)",
    "import atexit, time; atexit.register(time.sleep, 900)",
    "import atexit, sys; atexit.register(sys.exit, 0)",
    "import sys; sys.stdout.close()",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys, io; sys.stdout = io.StringIO()",
    "import os; os.close(1)",
    "import os; os.closerange(0, 3)",
    "import os; os.closerange(3, 200)",
    "import os; os.chdir('/')",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1)",
    "import signal, sys; signal.signal(signal.SIGALRM, lambda *_: sys.exit(0)); signal.alarm(1)",
    "import sys; sys.excepthook = lambda *_: None",
    "import warnings; warnings.simplefilter('error')",
    "print('audit of batches of 16: equivalent')",
    "import torch; torch.set_num_threads(2)",
    "import builtins; builtins.print = lambda *_, **__: None",
    "import os; os.environ.clear()",
    "import sys; sys.argv[:] = []",
    "import gc; gc.disable()",
)


def attack(rng: Random, folder: Path) -> str:
    """A right or a wrong loop that does one thing more somewhere; the exit code never says more than was found out."""
    ends = rng.random() < 0.5
    deed = rng.choice(ENDS if ends else HARMLESS)
    # a fork in a loop doubles the processes at each pass: more than any machine has
    places = ("at_import", "after") if "os.fork()" in deed else ("at_import", "before", "within", "after")
    place = rng.choice(places)
    right = rng.random() < 0.5
    parts = dict.fromkeys(("at_import", "before", "within", "after"), "pass") | {place: deed}
    divisor = "accumulation_steps" if right else "1"
    (folder / "code.py").write_text(FILE.format(divisor=divisor, optimizer=rng.choice(("SGD", "Adam")), **parts))
    mark = uuid4().hex
    command = [
        sys.executable,
        "-m",
        "accumulation_harness.audit",
        "code.py:train",
        "--batch-size",
        "16",
        "--accumulation-steps",
        "4",
    ]
    answer = ask(command, folder=folder, env={"CHAOS_MARK": mark}, seconds=150)
    about = f"{'right' if right else 'wrong'} loop, {place}: {deed}\n{answer}"
    allowed = (2,) if ends else (0, 2) if right else (1, 2)
    if answer.code not in allowed:
        raise Broken(f"exit code {answer.code}, not {allowed}: {about}")
    if answer.code < 2 and "audit of batches of 16: " not in answer.out:
        raise Broken(f"a verdict without a report: {about}")
    if answer.code == 2 and "could not" not in answer.out + answer.err:
        raise Broken(f"no reason given: {about}")
    if left := marked(mark):
        raise Broken(f"left behind: {left}: {about}")
    return {0: "equivalent", 1: "different", 2: "told why it could not be judged"}[answer.code]


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in their environment, after a moment to end."""
    for _ in range(30):
        left = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    left.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it has ended, or is another user's
                continue
        if not left:
            return []
        time.sleep(0.1)
    return left
