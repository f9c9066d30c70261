"""The demo's text and its batches."""

import itertools

import numpy as np
import pytest

from hetjax.demo.text import batches, load_corpus


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.mark.quick
def test_the_text_is_pythons_help(corpus):
    text = corpus.decode(np.concatenate([corpus.train, corpus.held_out]))
    assert len(text) > 300_000
    assert 'The "assert" statement' in text
    assert corpus.vocab_size == len(set(text)) < 200


@pytest.mark.quick
def test_targets_are_the_next_characters(corpus):
    batch = next(batches(corpus.train, 4, 16, seed=0))
    assert batch["tokens"].shape == batch["targets"].shape == (4, 16)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.quick
def test_the_last_window_can_be_drawn_and_seeds_repeat(corpus):
    tokens = np.arange(6, dtype=np.int32)
    drawn = list(itertools.islice(batches(tokens, 8, 4, seed=0), 20))
    assert max(int(b["targets"].max()) for b in drawn) == 5
    again = list(itertools.islice(batches(tokens, 8, 4, seed=0), 20))
    for a, b in zip(drawn, again):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
