"""`--explain` says what the runs do differently from the text alone: nothing is run, imported or written."""

from pathlib import Path

from accumulation_harness.audit.__main__ import main

SCRIPTS = Path(__file__).parent / "scripts"
SCHEDULED = """
import argparse
import torch
raise SystemExit("nothing is run")
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--rows", type=int)
parser.add_argument("--accum", type=int)
parser.add_argument("--unused", type=int)
args = parser.parse_args()
loader = torch.utils.data.DataLoader(DATA, args.rows, shuffle=True)
steps = len(loader) * 3
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
"""


def explained(capsys, *words):
    assert main([*words, "--explain", "--batch-size", "32", "--accumulation-steps", "4"]) == 0
    return capsys.readouterr().out


def section(said, name):
    return said.partition(f"\n{name}: ")[2].partition("\n\n")[0]


def test_lines_that_read_the_numbers_also_as_what_is_computed_of_them(monkeypatch, capsys):
    monkeypatch.chdir(SCRIPTS)
    said = explained(capsys, "by_fire.py", "--set", "--batch_size={total_batch} --micro_batch_size={batch_size}")
    assert (
        "N=1: by_fire.py --batch_size=32 --micro_batch_size=32\n  N=4: by_fire.py --batch_size=32 --micro_batch_size=8\n" in said
    )
    assert section(said, "batch_size").startswith("32 at every N")
    divided = section(said, "gradient_accumulation_steps")
    assert divided.startswith("1 at N=1, 4 at N=4") and "(loss / gradient_accumulation_steps)" in divided


def test_a_function_of_a_package_and_what_it_imports_from_there(monkeypatch, capsys):
    monkeypatch.chdir(SCRIPTS)
    said = explained(capsys, "package.train:train")
    assert "package.train:train(batch_size=8, accumulation_steps=4)" in said
    assert "package/steps.py:" in section(said, "micro_batch") and "(loss / accumulate)" in section(said, "accumulate")
    assert "seeds\n    package/train.py:" in said


def test_what_is_read_in_a_schedule_and_what_nobody_reads(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCHEDULED)
    monkeypatch.chdir(tmp_path)
    said = explained(capsys, "train.py", "--set", "-b {batch_size} --accum {accumulation_steps} --unused {total_batch}")
    assert "DataLoader" in section(said, "rows") and "read nowhere" in section(said, "unused")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_is_not_there_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["gone.py", "--explain", "--batch-size=32", "--accumulation-steps=4"]) == 2
    assert capsys.readouterr().err == "expected a file, got gone.py, which is not there\n"
    (tmp_path / "train.py").write_text(SCHEDULED)
    assert main(["train.py", "--explain", "--batch-size=32", "--accumulation-steps=4"]) == 2
    assert "how the script gets the two numbers" in capsys.readouterr().err
