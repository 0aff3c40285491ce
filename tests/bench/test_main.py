"""`accumulation-harness bench`: its command line, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from accumulation_harness import source
from accumulation_harness.bench import __main__ as bench
from accumulation_harness.bench import startup
from accumulation_harness.bench.__main__ import main
from accumulation_harness.bench.cost import Spread
from accumulation_harness.bench.measurement import Measurement


def measured(part: str, name: str, value: float) -> Measurement:
    return Measurement(part=part, name=name, unit="x", wall=Spread.of([value]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["overheads"], "expected parts of overhead"),
        (["scaling", "workload=text"], "expected parts of overhead, profile, by_hand with settings"),
        (["overhead", "workload=foo"], "workload=foo: expected one of"),
        (["profile", "optimizer.lr=-1"], "optimizer.lr=-1.0: expected a number from 1e-16"),
        (["by_hand", "lr=3"], "lr=3: expected one of norm"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    try:
        code = main([*arguments, "--out", str(out)])
    except SystemExit as exit:
        code = int(str(exit.code))
    assert code == 2 and expected in capsys.readouterr().err and not out.exists()


def test_a_part_replaces_its_own_measures_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, value = tmp_path / "bench.json", 1.0

    def measurements() -> Iterator[Measurement]:
        yield measured("startup", "a", value)

    monkeypatch.setattr(startup, "measurements", measurements)
    out.write_text(json.dumps({"measures": [{"part": "startup", "name": "gone"}, {"part": "memory", "name": "kept"}]}))
    assert main(["startup", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [(row["part"], row["name"]) for row in written["measures"]] == [("memory", "kept"), ("startup", "a")]
    assert written["environment"]["cores"] >= 1


@pytest.mark.parametrize("is_same", [True, False])
def test_a_bench_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool) -> None:
    """Parts that this commit has measured stand; another commit's are measured again, and so are those asked for by name."""
    taken, out = [], tmp_path / "bench.json"

    def part(name: str) -> SimpleNamespace:
        def measurements() -> Iterator[Measurement]:
            taken.append(name)
            if name == "memory" and taken.count(name) == 1:
                raise KeyboardInterrupt
            yield measured(name, "a", 1.0)

        return SimpleNamespace(measurements=measurements)

    commits = {"commit": "abc", "clean": True}
    monkeypatch.setattr(source, "commit", lambda: dict(commits))
    monkeypatch.setattr(bench, "PARTS", {"startup": "", "memory": ""})
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: part(name.rpartition(".")[2]))
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(out)])
    commits["commit"] = "abc" if is_same else "def"
    assert main(["--out", str(out)]) == 0
    assert taken == ["startup", "memory"] + ["startup"] * (not is_same) + ["memory"]
    assert sorted(row["part"] for row in json.loads(out.read_text())["measures"]) == ["memory", "startup"]
    assert main(["startup", "--out", str(out)]) == 0 and taken[-1] == "startup"
