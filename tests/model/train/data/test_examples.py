"""Training examples: words as tokens, padding without effect, an order that is a function of (seed, step)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.presets import preset, reshaped
from model.train.data.batch import IGNORE_INDEX, Example, evenly_spaced, pad_batch, shuffled_batches
from model.train.data.corpus import held_out_rows
from model.train.data.dataset import dataset_of_examples
from model.train.data.examples import examples_of_lines, examples_of_pairs
from model.train.data.sources import Sources
from model.train.data.vocabulary import END, Vocabulary, with_start_token
from model.train.step.objective import Objective
from tests.support.model.tiny_models import TEXT, tiny_decoder

WORDS = Vocabulary(kind="words", size=None, end_token="<EOS>")
STATQUEST = ["what is statquest <EOS> awesome <EOS>", "statquest is what <EOS> awesome <EOS>"]


def test_words_are_tokens_and_the_end_token_is_zero_wherever_it_stands() -> None:
    tokenizer = WORDS.train(STATQUEST)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (6, END)
    assert len(set(tokenizer.encode("what is statquest awesome"))) == 4
    ids = tokenizer.encode(STATQUEST[0])
    assert [i for i, token in enumerate(ids) if token == END] == [3, 5]
    assert tokenizer.encode("what is statquest<EOS>awesome  <EOS>") == ids


def test_an_unknown_word_is_one_token_and_rare_words_give_way() -> None:
    tokenizer = WORDS.train(["a a b <unk>"])
    unknown = tokenizer.encode("<unk>")
    assert len(unknown) == 1 and tokenizer.encode("never seen a") == [*unknown * 2, *tokenizer.encode("a")]
    few = dataclasses.replace(WORDS, size=3).train(["a a b"])
    assert few.vocab_size == 3
    assert few.encode("a b") == [2, 1]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_any_word_can_be_the_end_token_and_stand_in_front_of_prompts(kind: str) -> None:
    vocabulary = Vocabulary(kind=kind, size=300, end_token="<END>")  # type: ignore[arg-type]
    tokenizer = vocabulary.train([TEXT])
    assert tokenizer.encode("<END>") == [END]
    assert "<|endoftext|>" not in "".join(tokenizer.files().values())
    ids = tokenizer.encode("the moon")
    assert END not in ids
    with_start = with_start_token(tokenizer, "<END>")
    assert with_start.encode("the moon") == [END, *ids]
    assert with_start.encode("") == [END]
    assert with_start.encode_many(["the moon"]) == [ids]


def _cross() -> ModelConfig:
    return dataclasses.replace(reshaped(preset("cross"), width=32, n_heads=4, n_layers=2), vocab_size=20, context=16)


@pytest.mark.parametrize("with_source", [False, True])
def test_padding_is_no_part_of_the_loss(with_source: bool) -> None:
    config = _cross() if with_source else reshaped(_cross_without_encoder(), n_layers=2)
    decoder = tiny_decoder(config)
    objective = Objective(decoder, torch.device("cpu"), torch.float32)
    rows = [([3, 4], [5]), ([3, 4, 5, 6, 7, 8], [9, 10, 11, 12]), ([1, 2, 3], [4, 5])]
    examples = [Example(tokens, source if with_source else None) for tokens, source in rows]
    together = pad_batch(examples)
    assert together.inputs_RN.shape == (3, 5)
    assert together.n_targets == 1 + 5 + 2
    alone = [objective.loss_sum(pad_batch([example])) for example in examples]
    assert torch.allclose(objective.loss_sum(together), torch.stack(alone).sum(), atol=1e-3)
    parts = [objective.loss_sum(part) for part in together.split(2)]
    assert len(parts) == 2
    assert torch.allclose(torch.stack(parts).sum(), torch.stack(alone).sum(), atol=1e-3)
    unmasked = dataclasses.replace(
        together, targets_RN=together.targets_RN.masked_fill(together.targets_RN == IGNORE_INDEX, 0)
    )
    assert objective.loss_sum(unmasked) > objective.loss_sum(together) + 0.1, "padding that counted would show"


def _cross_without_encoder() -> ModelConfig:
    return dataclasses.replace(_cross(), n_encoder_layers=0)


def test_the_order_of_examples_is_a_function_of_seed_and_step_and_an_epoch_sees_all_once() -> None:
    examples = [Example([i, i + 1]) for i in range(10)]
    order, backwards, other = (shuffled_batches(examples, rows=4, seed=seed) for seed in (1, 1, 2))
    batches = [order(step).inputs_RN for step in range(5)]
    assert all(torch.equal(backwards(step).inputs_RN, batches[step]) for step in reversed(range(5)))
    seen = torch.cat(batches).flatten().tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert not torch.equal(other(0).inputs_RN, batches[0])


def test_a_glance_is_of_all_texts_and_not_of_the_first_ones() -> None:
    batches = [pad_batch([Example([i, i, i])]) for i in range(6)]

    def glance(n_targets: float) -> list[int]:
        return [int(batch.inputs_RN[0, 0]) for batch in evenly_spaced(batches, n_targets)]

    assert glance(0) == [0] and glance(4) == [0, 3] and glance(6) == [0, 2, 4]
    assert glance(12) == glance(math.inf) == [0, 1, 2, 3, 4, 5]


def test_rows_are_held_out_only_where_there_are_enough() -> None:
    assert held_out_rows(map(str, range(19))) == set()
    assert len(held_out_rows([*map(str, range(20)), "1", "2"])) == 1
    assert len(held_out_rows(map(str, range(1000)))) == 10


def test_held_out_lines_and_pairs_are_never_learnt_from_not_even_as_copies(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"w{i} x{i}\ty{i}\nw{i}  x{i}\tz{i}\n" for i in range(100)))
    lines = examples_of_lines(Sources([str(path)]), vocabulary=WORDS, from_end=True, context=16)
    pairs = examples_of_pairs(Sources([str(path)]), vocabulary=WORDS, context=16)
    for texts, n_held_out in ((lines, 2), (pairs, 1)):
        material = dataset_of_examples(texts, None, rows=7, seed=1)
        (held_out,) = material.held_out
        assert material.measured == "held-out"
        assert material.per_epoch == 200 - 2
        assert len(held_out.inputs_RN) == n_held_out
        # The tokenizer has not seen their words either.
        assert (held_out.inputs_RN if held_out.sources is None else held_out.sources.tokens_RS).eq(1).any()


@pytest.mark.parametrize("from_end", [True, False])
def test_lines_end_with_one_end_token_and_start_with_one_or_with_their_first_word(
    tmp_path: Path, from_end: bool
) -> None:
    path, lines = tmp_path / "lines.txt", [*STATQUEST, "awesome is statquest"]
    path.write_text("\n".join([lines[0], f"<EOS> {lines[1]}" if from_end else lines[1], "", lines[2]]))
    texts = examples_of_lines(Sources([str(path)]), vocabulary=WORDS, from_end=from_end, context=7)
    material = dataset_of_examples(texts, None, rows=3, seed=1)
    encode_many, batch = material.tokenizer.encode_many, material.batch(0)
    rows = {
        (int(row[0]), *t[t.ne(IGNORE_INDEX)].tolist()) for row, t in zip(batch.inputs_RN, batch.targets_RN, strict=True)
    }
    without_end = encode_many([line.removesuffix(" <EOS>") for line in lines])
    assert rows == {(*[END] * from_end, *ids, END) for ids in without_end}
    assert material.tokenizer.encode("") == [END] * from_end, "prompts begin as rows do"
    prompt = material.prompts[0]
    assert prompt.text == "what is statquest <EOS>"
    assert prompt.tokens == material.tokenizer.encode(prompt.text)
