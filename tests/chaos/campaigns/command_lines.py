"""Generated command lines: one line of refusal with code 2, or configurations that can be run; no traceback, no wait.

Nothing is trained: where a command line would start trials, their number is printed. No path that is drawn leads out of the
case's folder but by links to what is odd elsewhere (a device): the commands may run as root.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

from accumulation_harness.config import HarnessConfig
from accumulation_harness.system.terminal import told
from tests.chaos.campaign import Answer, Broken

SECONDS = 60
MOST_MEMORY = 6 * 2**30
GROUPS = ("workload", "optimizer", "schedule", "tracking", "experiment")
NUMBERS = (
    *("0", "-0.0", "1", "2", "3", "7", "64", "-1", "1e3"),
    *("1e-3", "0.5", ".5", "1.", "+1", "1_000", "0x10", "1e300", "1e-320", "nan"),
    *("inf", "-inf", "1e400", str(2**31), str(2**63 - 1)),
    *(str(2**63), str(10**39), "9" * 400, "9" * 5000, "1" + "0" * 30, "1e308"),
)  # fmt: skip
TEXTS = (
    *("", "''", '""', "null", "none", "true", "False", "abc", "a b"),
    *("'a b'", '"a,b"', "a:b", "a=b", "=", "é", "名", "\u202e", "\x7f"),
    *("x" * 300, "x" * 5000, "../up", "./", "../here", "here/./x", "x~", "$NOTHING", "%s"),
    *("{}", "\\", "\\,", "'", '"', "#", "?", "*", "\t"),
    *("${steps}", "${nothing}", "${oc.env:LANG}", "${oc.env:NO_SUCH}", "${now:%Y}"),
    *("${", "$", "${hydra:job.name}", "${.steps}", "???"),
    *("\udcff", "a\nb", "a\rb", "<script>", "_target_", "__class__", "@x", "a@b"),
    *("+x", "~x", "1,2,", ",", ",,", "-", "--", "\ud83d\ude00"),
)  # fmt: skip
STRUCTURES = (
    *("[]", "[1]", "[2,4]", "[1,[2]]", "[a]", "[null]", "[1.5]", "[nan]"),
    *("[", "]", "{}", "{a:1}", "{a:{b:[1]}}", "{", "{a}", "[${steps}]"),
    *("[" * 200, "[" * 200 + "]" * 200, "{a:" * 150 + "1" + "}" * 150),
    *("[" + ",".join("1" * 500) + "]", "choice()", "choice(1,2)"),
    *("range(3)", "range(0)", "range(1,2,0)", "range(10,0)"),
    *("range(1000000000000000)", "range(0,1e30)", "range(1,inf)", "range(a)"),
    *("interval(0,1)", "glob(*)", "glob(a*)", "tag(t,1)", "shuffle(1,2,3)"),
    *("sort(3,2,1)", "int(a)", "int(1.5)", "json_str(1)", "float(nan)"),
    *("shuffle(range(1000000000000))", "sort(range(100000000000))", "extend_list(1)", "append(1)"),
    *("prepend(1)", "a(", "f()", "str([1])"),
)  # fmt: skip
HYDRA_OPTIONS = (
    *(["--cfg", "job"], ["--cfg", "hydra"], ["--cfg", "all"]),
    *(["--cfg", "x"], ["-c"], ["--resolve"], ["--cfg", "job", "--resolve"]),
    *(["--help"], ["--hydra-help"], ["--version"], ["--info"]),
    *(["--info", "defaults"], ["--info", "x"], ["-sc", "query=bash"], ["-sc", "x"]),
    *(["-sc", "install=bash"], ["-sc", "uninstall=zsh"], ["--shell-completion"]),
    *(["--package", "optimizer"], ["--package", "x"], ["-p"]),
    *(["--config-name", "x"], ["--config-name", "config"], ["--config-path", "x"]),
    *(["--config-dir", "x"], ["--config-dir", "."], ["-cd"]),
    *(["--run"], ["-m"], ["--multirun"], ["-m", "--run"], ["--experimental-rerun", "x"]),
    *(["--no-such"], ["-x"], ["--"], ["-"], ["-h"]),
)  # fmt: skip
HYDRA_SETTINGS = (
    *("hydra.verbose", "hydra.mode", "hydra.job.name"),
    *("hydra.job.chdir", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"),
    *("hydra.output_subdir", "hydra.sweeper.grids", "hydra.sweeper.quick"),
    *("hydra.sweeper.size", "hydra.sweeper.params", "hydra.callbacks"),
    *("hydra.sweeper.experiments", "hydra.job.env_set"),
    *("hydra.job.config.override_dirname", "hydra.help.header", "hydra.searchpath"),
    *("hydra/launcher", "hydra/sweeper", "hydra/job_logging", "hydra/hydra_logging"),
    *("hydra/output", "hydra/help", "hydra/env", "hydra"),
    *("hydra.launcher._target_", "hydra.sweeper._target_", "hydra.job.num"),
    *("hydra.runtime.cwd", "hydra.overrides.task", "hydra.job.id"),
)  # fmt: skip
HYDRA_VALUES = (
    "basic",
    "forkserver",
    "grids",
    "default",
    "disabled",
    "none",
    "stdout",
    "colorlog",
    "MULTIRUN",
    "RUN",
    "quick",
    "[sensitivity]",
)


def attack(rng: Random, folder: Path) -> str:
    """One command line of one of the commands."""
    name, arguments, run = draw(rng, folder)
    inside = folder / "here"  # so that `..` is in the folder too
    inside.mkdir()
    answer = forked(run, arguments, inside)
    if (folder / "notes.txt").exists() and (folder / "notes.txt").read_text() != "somebody's":
        raise Broken(f"somebody's file is overwritten: {name} {arguments!r:.3000}")
    about = f"{name} {arguments!r:.3000}: code {answer.code}\n{answer.out[-500:]}\n{answer.err[-3000:]}"
    if "Traceback (most recent call last)" in answer.out + answer.err:
        raise Broken(f"a traceback: {about}")
    if answer.code not in (0, 1, 2):
        raise Broken(f"another exit code: {about}")
    if answer.code == 2 and (answer.err.count("\n") != 1 or not answer.err.strip()):
        raise Broken(f"a refusal that is not one line: {about}")
    if answer.code == 2 and len(answer.err) > 2500:
        raise Broken(f"a refusal that nobody reads: {about}")
    return f"{name}: {('worked', 'failed', 'refused')[answer.code]}"


def draw(rng: Random, folder: Path) -> tuple[str, list[str], Callable[[], int]]:
    """The name of a command, arguments for it, and what runs it."""
    kind = rng.choices(("run", "sweep", "plan", "status", "audit", "report"), (40, 30, 10, 5, 5, 5))[0]
    if kind in ("run", "sweep"):
        return kind, run_line(rng, is_sweep=kind == "sweep"), run_main
    if kind == "plan":
        budget = rng.choice(
            ["memory=", "memory=24GB", "b=auto", f"memory={rng.choice(NUMBERS)}{rng.choice(['', 'GB', 'KiB', 'x'])}", "b=1"]
        )
        arguments = [budget, *(setting(rng, sweep=False) for _ in range(rng.randrange(3)))]
        rng.shuffle(arguments)
        return kind, arguments, plan_main
    path = rng.choice(paths_in(folder))
    options = {
        "status": ([f"--results={path}"], ["--results", path], ["--results"], [path], ["-x"], ["--help"]),
        "audit": (
            [f"{path}:f", "--batch-size", rng.choice(NUMBERS), "--accumulation-steps", rng.choice(NUMBERS)],
            [rng.choice(TEXTS)],
            ["f.py:f", "--batch-size=16", "--accumulation-steps=4", "--save", path],
            ["f.py:f", "--batch-size=16", f"--accumulation-steps={rng.choice(TEXTS + STRUCTURES)}"],
            ["f.py:f", "--batch-size=16", "--accumulation-steps=5,5", "--processes", rng.choice(NUMBERS)],
            [],
        ),
        "report": (
            [f"--results={path}", f"--out={folder / 'out'}"],
            ["--results", str(folder / "none"), f"--out={path}"],
            ["--x"],
        ),
    }
    return kind, rng.choice(options[kind]), importlib.import_module(MODULES[kind]).main


MODULES = {
    "status": "accumulation_harness.sweep.status",
    "audit": "accumulation_harness.audit.__main__",
    "report": "accumulation_harness.analysis.report",
}


def paths_in(folder: Path) -> tuple[str, ...]:
    """Odd paths. Whatever is done to them, even by root, stays in `folder`: what is odd outside is only linked to."""
    links = {"null": "/dev/null", "full": "/dev/full", "process": "/proc/self", "memory": "/proc/self/mem", "nothing": "x/y"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (folder / "notes.txt").write_text("somebody's")
    os.mkfifo(folder / "pipe")
    return (*(str(folder / name) for name in (*links, "notes.txt", "pipe", "none", ".")), "", "x" * 5000, "\udcff", "a")


def run_line(rng: Random, *, is_sweep: bool) -> list[str]:
    """Settings, groups, Hydra's own options and settings, in any order."""
    parts = [[setting(rng, sweep=is_sweep)] for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    if is_sweep:
        parts.append([rng.choice(("-m", "-m", "+experiment=equivalence", "+experiment=precision", "hydra.mode=MULTIRUN"))])
    if rng.random() < 0.25:
        parts.append(list(rng.choice(HYDRA_OPTIONS)))
    if rng.random() < 0.25:
        parts.append([f"{rng.choice(HYDRA_SETTINGS)}={value(rng, HYDRA_VALUES)}"])
    rng.shuffle(parts)
    return [word for part in parts for word in part]


def setting(rng: Random, *, sweep: bool) -> str:
    """`key=value`, mostly of a key that there is, and often a value of its kind."""
    fields = kinds(HarnessConfig)
    key = rng.choice(sorted(fields))
    kind = fields.get(key)
    if rng.random() < 0.2:
        key, kind = rng.choice(GROUPS), None
    if rng.random() < 0.1:
        wrong = (key[:-1], f"{key}.x", key.upper(), f"x.{key}", f"{key}.0", f"{key}@y", f" {key}", "_target_", rng.choice(TEXTS))
        key = rng.choice(wrong)
    prefix = rng.choice(("", "", "", "", "", "", "+", "++", "~"))
    fitting = fitting_values(kind)
    number = rng.choice((2, 3)) if sweep else 1
    values = [rng.choice(fitting) if fitting and rng.random() < 0.6 else value(rng) for _ in range(number)]
    text = ",".join(values) if sweep and rng.random() < 0.8 else values[0]
    whole = f"{prefix}{key}={text}"
    return rng.choice((whole, f"{prefix}{key}", text)) if rng.random() < 0.1 else whole


def value(rng: Random, more: Sequence[str] = ()) -> str:
    """Any value."""
    return rng.choice(rng.choice((NUMBERS, TEXTS, STRUCTURES, tuple(more) or TEXTS)))


def kinds(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every field by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        found[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            found |= kinds(hint, f"{prefix}{name}.")
    return found


def fitting_values(kind: Any) -> tuple[str, ...]:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.name for member in kind)
    if get_origin(kind) is tuple:
        return ("[2,4]", "[1]", "[2]", "[64]", "[]", "[scale@1e-6]", "[all]", "[loss_not_divided]")
    number = {int, float} & {kind, *get_args(kind)}
    return ("1", "2", "3", "5", "8", "16", "30", "64") if number else ()


# In a copy of this process, which has everything imported already ---------------------------------------------------------


def run_main() -> int:
    """`accumulation-harness run`, where trials are counted in the place of being run."""
    from accumulation_harness.sweep import experiment, run

    def count(configs: Sequence[HarnessConfig], run: object = None) -> experiment.Outcome:
        print(f"{len(configs)} trials")
        return experiment.Outcome(done=len(configs), skipped=0)

    experiment.run_many = count
    return run.main()


def plan_main() -> int:
    """`accumulation-harness plan`, where nothing is measured."""
    from accumulation_harness.measure import plan

    plan.fit_memory = lambda config: (1e6, 1e5)
    plan.failure = lambda config, micro_batch: None
    return plan.main()


def forked(run: Callable[[], int], arguments: Sequence[str], folder: Path) -> Answer:
    """What a copy of this process answers that has these arguments, in `folder`."""
    import accumulation_harness.sweep.run  # noqa: F401 # once, for all copies

    out, err = folder / "stdout", folder / "stderr"
    child = os.fork()
    if child == 0:
        os._exit(_in_copy(run, arguments, folder, out, err))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return Answer(os.waitstatus_to_exitcode(status), out.read_text(errors="replace"), err.read_text(errors="replace"))
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Broken(f"no end within {SECONDS} s: {arguments!r:.1000}")


def _in_copy(run: Callable[[], int], arguments: Sequence[str], folder: Path, out: Path, err: Path) -> int:
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        for number, path in ((0, Path(os.devnull)), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.argv = ["harness", *arguments]
        code = told(run)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
