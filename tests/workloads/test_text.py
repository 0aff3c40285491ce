"""Text: lines of unequal length, and their losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.text import IGNORED, PADDING, TextWorkload, embedded_text, read_corpus

CPU = torch.device("cpu")


def text(root: Path | None = None, *, norm: Norm = Norm.layer) -> TextWorkload:
    config = TrialConfig(
        workload=WorkloadConfig(data=Data.text, model=Model.transformer),
        norm=norm,
        data=DataConfig(root=None if root is None else str(root)),
    )
    workload = make_workload(config, device=CPU, dtype=torch.float64)
    assert isinstance(workload, TextWorkload)
    return workload


def test_lines_are_ragged() -> None:
    workload = text()
    terms = workload.num_terms(workload.batch(torch.arange(workload.num_samples)))
    assert (workload.num_samples, len(workload.held_out)) == (2000, 300)
    assert (int(terms.min()), int(terms.max())) == (3, 31)
    assert len(set(terms.tolist())) > 25
    assert terms.double().std() > 5
    # Of sixteen windows cut into micro-batches of four, all have micro-batches with unequal numbers of terms.
    assert all(len(set(window.sum(1).tolist())) > 1 for window in terms[: 16 * 64].view(16, 16, 4))


def test_rows_spell_lines_of_the_text() -> None:
    workload = text()
    corpus = read_corpus(None)
    batch = workload.batch(torch.tensor([5, 0, 1999]))
    for row, sample in enumerate(batch.ids.tolist()):
        line, length = corpus.lines[sample], int(workload.num_terms(batch)[row])
        assert length == len(line) - 1
        assert line in corpus.text
        assert "".join(corpus.vocabulary[i - 1] for i in batch.inputs[row, :length].tolist()) == line[:-1]
        assert "".join(corpus.vocabulary[i - 1] for i in batch.targets[row, :length].tolist()) == line[1:]
        assert (batch.inputs[row, length:] == PADDING).all()
        assert (batch.targets[row, length:] == IGNORED).all()


def test_a_batch_is_as_long_as_its_longest_line_and_its_rows_keep_that() -> None:
    workload = text()
    batch = workload.batch(torch.arange(64))
    terms = workload.num_terms(batch)
    assert batch.inputs.shape == batch.targets.shape == (64, terms.max())
    shortest = terms.argmin()
    assert batch.rows(shortest.view(1)).inputs.shape == (1, terms.max())
    assert workload.batch(batch.ids[shortest].view(1)).inputs.shape == (1, terms.min())


def test_no_line_is_both_trained_on_and_held_out() -> None:
    lines = read_corpus(None).lines
    assert len(lines) == len(set(lines))
    assert len(set(text().held_out.ids.tolist())) == 300
    assert int(text().held_out.ids.min()) == 2000


def test_the_split_depends_on_no_seed_and_the_fingerprint_on_the_text(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = text()
    torch.manual_seed(2)
    assert torch.equal(first.held_out.inputs, text().held_out.inputs)
    assert first.fingerprint == text().fingerprint
    (tmp_path / "a.txt").write_text("one line\nand another one\n")
    assert text(tmp_path).fingerprint != first.fingerprint


def test_losses_and_correct_against_a_plain_computation() -> None:
    workload = text()
    batch = workload.batch(torch.arange(6))
    shape = (*batch.targets.shape, workload.vocabulary_size)
    outputs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs[0, 0, batch.targets[0, 0]] = 9.0
    losses, correct, terms = workload.losses(outputs, batch), workload.correct(outputs, batch), workload.num_terms(batch)
    for row in range(6):
        loss, hits, count = 0.0, 0, 0
        for scores, target in zip(outputs[row], batch.targets[row].tolist(), strict=True):
            if target != IGNORED:
                loss += float(scores.exp().sum().log() - scores[target])
                hits += int(scores.argmax()) == target
                count += 1
        assert float(losses[row]) == pytest.approx(loss, rel=1e-12)
        assert (int(correct[row]), int(terms[row])) == (hits, count)
    assert int(correct[0]) >= 1
    assert workload.losses(outputs.half(), batch).dtype == torch.float32


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("tschüß, zweite Datei\n\n  \nab\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first file\n" + "x" * 100, encoding="utf-8")
    (tmp_path / "ignored.md").write_text("not this one")
    corpus = read_corpus(str(tmp_path))
    assert corpus.text.startswith("first file")
    assert sorted(corpus.lines) == ["first file", "tschüß, zweite Datei", "x" * 32]  # blank and too short ones are dropped
    workload = text(tmp_path)
    assert (workload.num_samples, len(workload.held_out)) == (2, 1)
    assert workload.vocabulary_size == len(set(corpus.text)) + 1


FOLDERS: dict[str, tuple[dict[str, bytes], str]] = {
    "no such folder": ({}, r"\*\.txt"),
    "no text file": ({"notes.md": b"some words"}, r"\*\.txt"),
    "not utf-8": ({"a.txt": b"good line\nanother\n", "b.txt": b"\xff\xfe\x00bad"}, "b.txt"),
    "empty": ({"a.txt": b""}, "two or more"),
    "only short lines": ({"a.txt": b"a\nb\n\nabc\n"}, "two or more"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_unusable_folders(case: str, tmp_path: Path) -> None:
    files, message = FOLDERS[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    root = tmp_path if files else tmp_path / "absent"
    with pytest.raises(ConfigError, match=message) as caught:
        text(root)
    assert caught.value.field == "data.root"
    assert str(root) in str(caught.value)


def test_embedded_text_is_real() -> None:
    assert len(embedded_text()) > 100_000
