import pytest

from tests.studies.by_hand import Loop
from tests.trials import measured, trial

CONFIG = "study=tensor_norms effective_batch=24 accumulation_steps=[3,12] steps=3 probe_every=2 seed=6"


def test_norms_are_those_of_autograd():
    loop, rows = Loop(trial(CONFIG)), measured(trial(CONFIG))
    named = dict(loop.model.named_parameters())
    parts = loop.gradient(next(loop.windows())).split([p.numel() for p in named.values()])
    expected = {name: float(part.norm()) for name, part in zip(named, parts, strict=True)}
    assert {(row["step"], row["accumulation_steps"]) for row in rows} == {(0, 3), (0, 12), (2, 3), (2, 12)}
    for row in rows:
        assert row["step"] or row["full_norm"] == pytest.approx(expected[row["tensor"]], rel=1e-12)
        assert row["accumulated_norm"] == pytest.approx(row["full_norm"], rel=1e-12)
