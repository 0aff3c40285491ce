"""Right loops under settings drawn at random over all that is accepted: none may be blamed, and every trial has to end."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch

from accumulation_harness.config import ConfigError, to_dict
from accumulation_harness.draws import drawn
from accumulation_harness.judge.cause import INHERENT, JOINT
from accumulation_harness.judge.verdict import Doubt
from accumulation_harness.trial import run_trial
from tests.chaos.campaign import Broken


def attack(rng: Random, folder: Path) -> str:
    """One trial, every arm of which is right."""
    torch.set_num_threads(1)
    config = drawn(rng)
    asked = json.dumps(to_dict(config))
    try:
        arms = run_trial(config, lambda step, rows: None).arms
    except ConfigError as error:
        raise Broken(f"refused after it was accepted: {error}\n{asked}") from error
    answers = set()
    for arm in arms:
        own = {*arm["cause"].split(JOINT)} - {""}
        inherent = arm["verdict"] == "different" and own and INHERENT.issuperset(own) and arm["explained"]
        if arm["verdict"] not in ("equivalent", "inconclusive") and not inherent:
            raise Broken(
                f"{arm['arm']} at N={arm['accumulation_steps']}: {arm['verdict']} {arm['cause']}: {arm['reasons']}\n{asked}"
            )
        if arm["verdict"] == "inconclusive":
            known = [doubt.name for doubt in Doubt if arm["reasons"][0].startswith(doubt)]
            answers.add(f"inconclusive ({known[0] if known else 'unknown'})")
        else:
            answers.add("inherent" if inherent else "equivalent")
    return " and ".join(sorted(answers))
