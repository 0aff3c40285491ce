"""flair's `ModelTrainer` with `mini_batch_chunk_size`: a tagger and a classifier, whose losses are sums."""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from typing import Any

import flair
import torch
from flair.data import Corpus, Sentence
from flair.datasets import FlairDatapointDataset
from flair.embeddings import DocumentPoolEmbeddings, OneHotEmbeddings
from flair.models import SequenceTagger, TextClassifier
from flair.trainers import ModelTrainer

warnings.simplefilter("ignore")
logging.getLogger("flair").setLevel(logging.ERROR)
flair.device = torch.device("cpu")
SENTENCES, EPOCHS = 40, 2


def _corpus() -> Corpus[Sentence]:
    """40 sentences of 2 to 12 words out of 20, a tag for each word and a label for each sentence."""
    generator = random.Random(2)
    sentences = []
    for _ in range(SENTENCES):
        words = [generator.randrange(20) for _ in range(generator.randint(2, 12))]
        sentence = Sentence([f"w{word}" for word in words], use_tokenizer=False)
        for token, word in zip(sentence, words, strict=True):
            token.add_label("tag", f"T{word % 3}")
        sentence.add_label("class", f"C{sum(words) % 3}")
        sentences.append(sentence)
    return Corpus(train=FlairDatapointDataset(sentences), sample_missing_splits=False)


def _train(model: Any, corpus: Any, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    settings = {"learning_rate": 0.01, "optimizer": torch.optim.SGD, "max_grad_norm": None} | settings
    with tempfile.TemporaryDirectory() as folder:
        ModelTrainer(model, corpus).train_custom(
            folder,
            mini_batch_size=batch_size * accumulation_steps,
            mini_batch_chunk_size=batch_size,
            max_epochs=EPOCHS,
            shuffle=False,
            save_final_model=False,
            create_file_logs=False,
            create_loss_file=False,
            **settings,
        )


def _tagger(corpus: Any, *, crf: bool, **dropouts: float) -> SequenceTagger:
    flair.set_seed(0)
    embeddings = OneHotEmbeddings.from_corpus(corpus, min_freq=1, embedding_length=8)
    dictionary = corpus.make_label_dictionary("tag", add_unk=False)
    dropouts = {"dropout": 0.0, "word_dropout": 0.0, "locked_dropout": 0.0} | dropouts
    return SequenceTagger(embeddings, dictionary, "tag", hidden_size=8, use_crf=crf, **dropouts)


def tagger(batch_size: int, accumulation_steps: int) -> None:
    """`SequenceTagger`, SGD, no dropout, unequal lengths, a remainder."""
    corpus = _corpus()
    _train(_tagger(corpus, crf=False), corpus, batch_size, accumulation_steps)


def tagger_crf(batch_size: int, accumulation_steps: int) -> None:
    """`SequenceTagger` with a conditional random field, SGD, no dropout, unequal lengths, a remainder."""
    corpus = _corpus()
    _train(_tagger(corpus, crf=True), corpus, batch_size, accumulation_steps)


def tagger_adamw(batch_size: int, accumulation_steps: int) -> None:
    """`SequenceTagger`, AdamW, clipping at 5, a linear schedule with warmup, unequal lengths, a remainder."""
    from flair.trainers.plugins import LinearSchedulerPlugin

    corpus = _corpus()
    settings = {"optimizer": torch.optim.AdamW, "max_grad_norm": 5.0, "plugins": [LinearSchedulerPlugin(0.2)]}
    _train(_tagger(corpus, crf=False), corpus, batch_size, accumulation_steps, **settings)


def tagger_dropout(batch_size: int, accumulation_steps: int) -> None:
    """`SequenceTagger` with a conditional random field and the default dropouts (words 0.05, locked 0.5), a remainder."""
    corpus = _corpus()
    _train(_tagger(corpus, crf=True, word_dropout=0.05, locked_dropout=0.5), corpus, batch_size, accumulation_steps)


def classifier(batch_size: int, accumulation_steps: int) -> None:
    """`TextClassifier` over mean word vectors, SGD, a remainder."""
    corpus = _corpus()
    flair.set_seed(0)
    embeddings = DocumentPoolEmbeddings([OneHotEmbeddings.from_corpus(corpus, min_freq=1, embedding_length=8)])
    dictionary = corpus.make_label_dictionary("class", add_unk=False)
    _train(TextClassifier(embeddings, "class", label_dictionary=dictionary), corpus, batch_size, accumulation_steps)
