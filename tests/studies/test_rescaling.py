"""What is rescaled is the same in samples, by independent float64 loops; and the study's arms are what they say."""

import copy

import pytest
import torch
from torch import nn

from accumulation_harness.experiments.rescaling import rescaling
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.recipe import make_optimizer, make_schedule
from accumulation_harness.recipes.rescaling import Rescaling, rescaled
from tests.studies.by_hand import trial

K, LARGE_STEPS = 4, 10
CONFIG = trial(
    "study=rescaling effective_batch=32 accumulation_steps=[4] steps=16 ema_decay=0.9 workload.model=mlp workload.width=1",
    "data.last_window=drop schedule.warmup_steps=7",
    "optimizer.name=adamw optimizer.lr=0.01 optimizer.beta2=0.99 optimizer.weight_decay=0.1",
)


def shrunk(config, steps):
    """What AdamW leaves of a weight of 1 after so many steps without gradient."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make_optimizer(config, [weight])
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    return float(weight.detach())


@pytest.mark.parametrize("what", [Rescaling.weight_decay, Rescaling.all])
def test_weights_decay_per_sample_alike_to_first_order(what):
    large, product = rescaled(CONFIG, what, K).optimizer, 0.01 * 0.1
    assert shrunk(CONFIG.optimizer, K * LARGE_STEPS) == pytest.approx((1 - product) ** (K * LARGE_STEPS), rel=1e-13)
    assert shrunk(large, LARGE_STEPS) == pytest.approx((1 - K * product) ** LARGE_STEPS, rel=1e-13)
    first_order = LARGE_STEPS * K * (K - 1) / 2 * product**2
    apart = 1 - shrunk(large, LARGE_STEPS) / shrunk(CONFIG.optimizer, K * LARGE_STEPS)
    assert apart == pytest.approx(first_order, rel=0.02) and apart > 1e-5, "not exact, and known how far off"
    assert shrunk(CONFIG.optimizer, LARGE_STEPS) / shrunk(CONFIG.optimizer, K * LARGE_STEPS) > 1.03, "copied, it decays less"


def rates(schedule, steps):
    """The rates of so many steps, of which the full one is 1."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    own, found = make_schedule(schedule, optimizer, steps), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        own.step()
    return found


def test_the_warm_up_in_samples():
    small = rates(CONFIG.schedule, K * LARGE_STEPS)
    large = rates(rescaled(CONFIG, Rescaling.warmup, K).schedule, LARGE_STEPS)
    assert large == pytest.approx(small[K - 1 :: K], rel=1e-15), "the rate of the last small step of each window"
    assert rates(CONFIG.schedule, LARGE_STEPS)[:3] == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    assert large[:3] == pytest.approx([4 / 8, 1, 1])


def test_one_thing_is_rescaled_at_a_time():
    def changed(what):
        large = rescaled(CONFIG, what, K)
        now = {"lr": large.optimizer.lr / 0.01, "beta2": large.optimizer.beta2, "decay": large.optimizer.weight_decay,
               "warmup": large.schedule.warmup_steps, "ema": large.ema_decay}  # fmt: skip
        usual = {"lr": 1.0, "beta2": 0.99, "decay": 0.1, "warmup": 7, "ema": 0.9}
        return {name: value for name, value in now.items() if value != usual[name]}

    assert changed(Rescaling.copied) == {}
    assert [set(changed(what)) for what in Rescaling][1:-1] == [{"lr"}, {"beta2"}, {"decay"}, {"warmup"}, {"ema"}]
    assert changed(Rescaling.all) == pytest.approx({"lr": 2, "beta2": 0.99**4, "decay": 0.2, "warmup": 1, "ema": 0.9**4})


def test_the_small_batch_is_a_loop_of_its_own():
    setting = Setting(CONFIG, torch.device("cpu"))
    chosen = rescaling.Samples.drawn(setting)
    workload = setting.workloads[torch.float32]
    model = copy.deepcopy(setting.initial).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = 0
    for ids in chosen.windows(setting):
        for part in ids.split(32 // K):
            batch = workload.batch(part)
            optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (steps + 1) / 8)
            optimizer.zero_grad()
            workload.losses(workload.forward(model, batch), batch).mean().backward()
            optimizer.step()
            for name, p in model.named_parameters():
                average[name] = p.detach().clone() if steps == 0 else 0.9 * average[name] + 0.1 * p.detach()
            steps += 1
    probe = workload.batch(chosen.probe)
    (row,) = (r for r in rescaling.measurements(setting, lambda t, own: None) if r["arm"] == "small")
    with torch.no_grad():
        own = float(workload.losses(workload.forward(model, probe), probe).double().mean())
        model.load_state_dict(average)
        smooth = float(workload.losses(workload.forward(model, probe), probe).double().mean())
    assert row["probe_loss"] == pytest.approx(own, rel=1e-4)
    assert row["ema_probe_loss"] == pytest.approx(smooth, rel=1e-4)
    assert abs(own / smooth - 1) > 1e-3
