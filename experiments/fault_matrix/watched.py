"""How often right settings and right loops were blamed, and wrong ones named: counts that are kept in `experiments/recorded`."""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis.answering import Material, Rate, Section, section, table
from accumulation_harness.experiments.shared.recorded import recorded

RIGHT = "none"  # the fault of a right loop
RUNGS = {"ledger": "calls and weights", "sketch": "sums of gradients", "replay": "replay"}


def random_settings(_material: Material) -> Section:
    """Right trials with all settings drawn at random, and watched loops, right and wrong: recorded, not measured here.

    Args:
        _material: Not used.

    Returns:
        The section.
    """
    right, watched = recorded("right_settings").iloc[0], recorded("watch")
    loops, wrong = watched.query("fault == @RIGHT"), watched.query("fault != @RIGHT")
    text = (
        f"Recorded at {right['commit']}: of {right['trials']} right trials ({right['arms']} arms) with every setting drawn at "
        f"random, {Rate(right['alarms'], right['trials'])} raised a false alarm; {right['not_judged']} have arms that could "
        f"not be judged. Recorded at {watched['commit'].iloc[0][:7]}: of {loops['loops'].sum()} random right loops "
        f"({loops['windows'].sum()} windows), a watch called {_rate(loops, 'different')} different."
    )
    rows = []
    for fault, own in wrong.groupby("fault", sort=False):
        counts = [own[name].sum() for name in ("loops", "different", *RUNGS)]
        rows.append((fault, *counts, f"{own['named'].sum()} ({_rate(own, 'named').interval})"))
    head = f"fault | loops | seen | {' | '.join(f'by {words}' for words in RUNGS.values())} | named alone (95% interval)"
    caption = "Watched loops with a planted fault. A check is counted where it was the first to say what is wrong."
    return section("Settings drawn at random", text, table(head, rows, caption))


def _rate(counts: pd.DataFrame, name: str) -> Rate:
    return Rate(int(counts[name].sum()), int(counts["loops"].sum()))
