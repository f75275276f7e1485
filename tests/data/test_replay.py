"""Replayed documents: everyday prompts with the base model's own answers, in a fixed order among the rows."""

import numpy as np
import pytest
from lessons import RandomDocuments

from tunewell.core.text import split_words
from tunewell.data.batches import DataOrder
from tunewell.data.replay import MAX_TOKENS, NUM_PROMPTS, WithReplay, replay_prompts, with_replayed
from tunewell.evaluation.forgetting import instructions

_FUNCTION_WORDS = frozenset(
    split_words(
        "a an the of to in on at is are do does did be can could should would will what which how why who when where i "
        "me my you your it its this that these with for and or please from there have has had one two three"
    )
)


def _order(seed: int = 0, *, share: float = 0.05) -> DataOrder:
    lengths, number = with_replayed(np.random.default_rng(3).integers(20, 60, 400), share)
    return DataOrder(lengths, seed, "corpus", batch_tokens=1024, num_replayed=NUM_PROMPTS, num_drawn=number)


def test_there_are_200_different_prompts() -> None:
    assert len(replay_prompts()) == len(set(replay_prompts())) == NUM_PROMPTS


def test_no_prompt_is_a_question_of_the_verdict_or_a_paraphrase() -> None:
    """Otherwise the verdict would measure what was trained, not what was kept."""
    for asked in instructions():
        words = split_words(asked.ask)
        known, start = set(words) - _FUNCTION_WORDS, words[:3]
        for prompt in replay_prompts():
            own = split_words(prompt)
            assert own[:3] != start, f"the template of {asked.ask!r}: {prompt!r}"
            shared = known & set(own)
            # A short instruction may share a word with a long prompt; half of its words and two make a paraphrase.
            assert len(shared) < max(2, len(known) / 2), f"{asked.ask!r} and {prompt!r} share {shared}"
            triples = [set(zip(text, text[1:], text[2:], strict=False)) for text in (words, own)]
            assert len(triples[0] & triples[1]) <= 0.2 * len(triples[0] | triples[1])


def test_the_order_is_a_function_of_seed_epoch_and_corpus() -> None:
    """A resumed run computes any step directly, and epochs draw different prompts."""
    one, other = _order(), _order()
    _ = [other.step(number) for number in (50, 3)]
    for number in (0, 7, 40):
        assert np.array_equal(one.step(number).documents, other.step(number).documents)
    drawn = [set(one.permutation(epoch)[one.permutation(epoch) >= one.num_rows].tolist()) for epoch in (0, 1)]
    assert drawn[0] != drawn[1] and len(drawn[0]) == one.num_drawn
    assert not np.array_equal(_order(1).permutation(0), one.permutation(0))


def test_every_row_is_seen_once_and_the_rest_is_the_share() -> None:
    order = _order(share=0.1)
    epoch = np.concatenate(order.steps_of_epoch(0))
    assert sorted(epoch[epoch < order.num_rows].tolist()) == list(range(400))
    tokens = int(order.lengths[:400].sum())
    assert 0.09 < 96 * order.num_drawn / (96 * order.num_drawn + tokens) < 0.11
    assert order.step(order.num_steps(1) - 1).seen == pytest.approx(1.0)
    assert order.num_steps(0.5) < order.num_steps(1) == len(order.steps_of_epoch(0))


def test_many_rows_draw_each_prompt_equally_often() -> None:
    """More than 200 documents are needed: no prompt is drawn twice as often as another."""
    lengths, number = with_replayed(np.full(40_000, 50), 0.05)
    order = DataOrder(lengths, 0, "corpus", batch_tokens=4096, num_replayed=NUM_PROMPTS, num_drawn=number)
    drawn = order.permutation(0)
    _, counts = np.unique(drawn[drawn >= order.num_rows], return_counts=True)
    assert len(counts) == NUM_PROMPTS and counts.max() - counts.min() <= 1


def test_without_replay_the_order_is_that_of_earlier_versions() -> None:
    """A run that was started before must go on with the same documents."""
    order = DataOrder(np.full(8, 10), 0, "c", batch_documents=3)
    assert order.permutation(0).tolist() == [1, 5, 7, 6, 2, 4, 3, 0]


def test_only_the_answer_of_a_replayed_document_is_supervised() -> None:
    rows = RandomDocuments(5)
    found = WithReplay(rows, [([1, 2, 3], [4, 5]), ([6], [7, 8, 9])])
    assert len(found) == 5 + NUM_PROMPTS == len(found.index["length"])
    assert [array.tolist() for array in found.arrays(5)] == [[1, 2, 3, 4, 5], [-100, -100, -100, 4, 5]]
    assert found.arrays(8)[0].tolist() == found.arrays(6)[0].tolist() == [6, 7, 8, 9]
    assert found.index["supervised"][5:7].tolist() == [2, 3] and found.index["length"][5:7].tolist() == [5, 4]
    assert np.array_equal(found.arrays(2)[0], rows.arrays(2)[0])
    assert max(found.index["length"][5:]) <= MAX_TOKENS
