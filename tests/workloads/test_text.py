"""Text: lines of unequal length, and their losses."""

import pytest
import torch

from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.text import IGNORED, PADDING, read_corpus
from tests.toy import CPU
from tests.trials import trial


def text():
    return make_workload(trial("workload.data=text workload.model=transformer norm=layer"), device=CPU, dtype=torch.float64)


def test_rows_spell_lines_of_the_text():
    workload = text()
    corpus = read_corpus()
    batch = workload.batch(torch.tensor([5, 0, 1999]))
    for row, sample in enumerate(batch.ids.tolist()):
        line, length = corpus.lines[sample], int(workload.num_terms(batch)[row])
        assert length == len(line) - 1
        assert line in corpus.text
        assert "".join(corpus.vocabulary[i - 1] for i in batch.inputs[row, :length].tolist()) == line[:-1]
        assert "".join(corpus.vocabulary[i - 1] for i in batch.targets[row, :length].tolist()) == line[1:]
        assert (batch.inputs[row, length:] == PADDING).all()
        assert (batch.targets[row, length:] == IGNORED).all()


def test_losses_and_correct_against_a_plain_computation():
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
