"""A question that is written into a folder is listed, run and on the page: no other place is touched."""

import hydra
import pandas as pd
import pytest

from accumulation_harness import experiments
from accumulation_harness.analysis import report
from accumulation_harness.config import questions
from accumulation_harness.sweep.run import conf_dir, register_schema, to_config
from tests.trials import measured, stored, trial

FILES = {
    "__init__.py": '''"""How long are the windows?"""
from accumulation_harness.config.questions import Need, Question, Study
FULL = Need("steps", lambda c: c.steps > 1, "2 or more")
QUESTION = Question(place=15, core=True, studies={"window_lengths": Study(needs=(FULL,))})
''',
    "grid.yaml": "experiment: lengths\nstudy: window_lengths\nsteps: 2\n",
    "window_lengths.py": """def measurements(setting, on_step):
    return [{"length": len(ids)} for ids in setting.windows()]
""",
    "claims.csv": "id,source,claim\nZ1,S0,Every window has as many samples\n",
    "answers.py": """from accumulation_harness.analysis.question import Claim, ClaimResult, Experiment, Ruling
def alike(results):
    lengths = results.study("window_lengths", ("length",))["length"]
    ruling = Ruling.confirmed if lengths.nunique() == 1 else Ruling.refuted
    return ClaimResult(verdict=ruling, measured=float(lengths.max()), threshold="one", n=len(lengths), explanation="Counted.")
CLAIM = Claim(id="Z1", expects=Ruling.confirmed, rule="Counted.", decide=alike)
EXPERIMENT = Experiment(name="lengths", title="How long are the windows?", question="How long?", prediction="All B samples.",
                        rule="Counted.", claims=(CLAIM,), sections=())
""",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Below `experiments/`, as far as Python can tell."""
    place = tmp_path / "more" / "lengths"
    place.mkdir(parents=True)
    for name, text in FILES.items():
        (place / name).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(experiments, "__path__", [*experiments.__path__, str(place.parent)])
        _forget()
        yield place
    _forget()


def _forget():
    questions.folders.cache_clear()
    questions.studies.cache_clear()


def test_one_place_is_enough(folder, tmp_path):
    assert [*questions.questions()][:3] == ["equivalence", "lengths", "normalisation_of_loss"]
    register_schema()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("config", ["+experiment=lengths", "workload=digits_mlp"])).trial
    assert (config.experiment, config.study, config.steps) == ("lengths", "window_lengths", 2)
    with pytest.raises(ValueError, match="2 or more, with study=window_lengths"):
        measured(trial("study=window_lengths steps=1"))
    stored(tmp_path / "results", config)
    assert report.main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]) == 0
    claims = pd.read_csv(tmp_path / "out" / "claims.csv", index_col="id")
    assert claims.loc["Z1", ["verdict", "measured", "experiment"]].tolist() == ["confirmed", 64, "lengths"]
    assert "Every window has as many samples" in (tmp_path / "out" / "pages" / "lengths.html").read_text()
