"""What is advised of the combinations of a sweep: by verdict and cause, whatever the settings are called."""

from itertools import cycle
from types import SimpleNamespace

import pandas as pd
import pytest

from accumulation_harness.analysis.caveats import AS_IT_IS, caveats_that_occur
from accumulation_harness.analysis.content import Table, Text
from accumulation_harness.config import Norm, OptimizerName, Precision
from accumulation_harness.judge.cause import Cause, joined
from accumulation_harness.judge.verdict import Outcome
from tests.results.test_cells import ROW

FOUND = [
    (Outcome.equivalent, ()),
    (Outcome.inconclusive, ()),
    (Outcome.degraded, ()),
    (Outcome.degraded, (Cause.low_precision_accumulator,)),
    (Outcome.different, ()),
    *((Outcome.different, (cause,)) for cause in Cause),
    (Outcome.different, (Cause.batch_statistics, Cause.loss_not_divided)),
]
SETTINGS = [*zip(cycle([*Norm, "of_ones_own"]), [*OptimizerName, "of_ones_own"], cycle(Precision))]


def told(*found, settings):
    """The advice of each combination, in each of which all this was found; and what is said of whole settings."""
    arms = [
        ROW | {"norm": str(norm), "optimizer": str(optimizer), "precision": str(precision), "accumulation_steps": 2 * place + 2}
        | {"verdict": str(verdict), "cause": joined(causes), "clip_norm": None, "clipped_share": 0.0}
        for norm, optimizer, precision in settings
        for place, (verdict, causes) in enumerate(found)
    ]  # fmt: skip
    section = caveats_that_occur(SimpleNamespace(arms=pd.DataFrame(arms), l4=pd.DataFrame()))
    [table] = [part for part in section.blocks if isinstance(part, Table)]
    return [row[-1] for row in table.rows], " ".join(
        part.text for part in section.blocks if isinstance(part, Text) and not part.lead
    )


@pytest.mark.parametrize("found", FOUND, ids=str)
def test_advice_follows_from_verdict_and_cause_and_not_from_the_name_of_a_setting(found):
    verdict, causes = found
    advice, sentences = told(found, settings=SETTINGS)
    assert len(advice) == len(SETTINGS) and len(set(advice)) == 1
    assert (advice[0] == AS_IT_IS) == (verdict == Outcome.equivalent) == ("has to be avoided" in sentences)
    if verdict != Outcome.equivalent:
        assert AS_IT_IS not in advice[0] and "othing changes" not in sentences and "changes nothing" not in sentences
        known = set(causes) - {Cause.unexplained, Cause.batch_statistics}
        assert all(cause in advice[0] for cause in known)
        assert ("GroupNorm" in advice[0]) == (Cause.batch_statistics in causes)


@pytest.mark.parametrize("found", FOUND[1:], ids=str)
def test_an_equivalent_arm_beside_another_lends_it_no_advice(found):
    alone, _ = told(found, settings=SETTINGS[:1])
    assert told(FOUND[0], found, settings=SETTINGS[:1])[0] == told(found, FOUND[0], settings=SETTINGS[:1])[0] == alone
