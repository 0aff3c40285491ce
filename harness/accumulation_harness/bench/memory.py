"""(e) Memory: the peak of a trial against its bare arms, and what comparing keeps beside the arms.

The peak is that of the process, less what it takes before the first arm. Copies are counted in bytes of the parameters.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from accumulation_harness.bench.cost import Spread, own_memory
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.bench.scaling import SAMPLES, make_arm, wide
from accumulation_harness.measure.lock_step import REFERENCE, LockStep
from accumulation_harness.recipes.recipe import Arm, take_step
from accumulation_harness.results.arm_name import ArmName

PART = "memory"
ROUNDS = 2
SIZE = 10**7
ARMS = (2, 4, 8)
COPIES = 2.0


def measurements(rounds: int = ROUNDS) -> Iterator[Measurement]:
    """Copies that comparing keeps, and the peak of lock-step over that of bare arms, by the number of arms."""
    for num_arms in ARMS:
        copies = Spread.of([kept_copies(num_arms)])
        name = f"copies kept for comparing, {num_arms} arms of {SIZE:.0e} parameters"
        yield Measurement(part=PART, name=name, unit="copies", wall=copies, target=COPIES + 0.05, note="0.05: rows and blocks")
    for num_arms in ARMS:
        pairs = [(peak("lock", num_arms), peak("bare", num_arms)) for _ in range(rounds)]
        ratio = Spread.of([lock / bare for lock, bare in pairs])
        extra = Spread.of([(lock - bare) / (4 * SIZE) for lock, bare in pairs])
        note = f"{extra.median:.2f} copies of the parameters"
        yield Measurement(part=PART, name=f"peak of lock-step over bare arms, {num_arms} arms", unit="x", wall=ratio, note=note)


def kept_copies(num_arms: int) -> float:
    """Bytes of the tensors that live between two arms of a step, beside the arms' own, over those of one arm's parameters."""
    arms = arms_of(num_arms)
    before, seen = live_bytes(), []
    lock = LockStep(arms, seed=0)
    lock.step(torch.arange(SAMPLES), gradients="compared", exact=lambda label: seen.append(live_bytes()))
    return (max(*seen, live_bytes()) - before) / (4 * SIZE)


def arms_of(num_arms: int) -> dict[str, Arm]:
    """The full batch and `num_arms - 1` accumulating arms, on a model of `SIZE` parameters in float32."""
    workload = wide(SIZE)
    names = [str(ArmName("accumulated", 2, i)) for i in range(1, num_arms)]
    return {REFERENCE: make_arm(workload, 1)} | {name: make_arm(workload, 2) for name in names}


def live_bytes() -> int:
    """Bytes of all tensors that exist, each storage once."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]  # isinstance wakes lazy modules
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


def peak(side: str, num_arms: int) -> int:
    """Bytes by which a fresh process grows over two steps of all arms."""
    command = [sys.executable, "-m", "accumulation_harness.bench.memory", side, str(num_arms)]
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main(side: str, num_arms: int) -> None:
    """Take two steps of all arms, in lock-step or bare, and print the bytes by which the process grew."""
    torch.set_num_threads(1)
    arms, ids = arms_of(num_arms), torch.arange(SAMPLES)
    before = own_memory("VmHWM") - num_arms * 4 * SIZE
    if side == "lock":
        lock = LockStep(arms, seed=0)
        for _ in range(2):
            lock.step(ids, gradients="compared")
    else:
        for arm in arms.values():
            for _ in range(2):
                take_step(arm, arm.workload.batch(ids))
    print(own_memory("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
