"""The order of training sequences: a permutation with random access, the same for every batch size."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from trainers.batches import TrainingSequences, permuted
from trainers.corpus import SOURCE_TEXT
from trainers.errors import InputError
from trainers.tokens import Settings, TrainedTokenizer, open_split, prepare

CONTEXT = 16


@given(count=st.integers(1, 5000), key=st.binary(min_size=32, max_size=32))
@settings(max_examples=60)
def test_permuted_when_all_positions_are_given_then_each_place_comes_once(count, key):
    places = permuted(np.arange(count), count, key)
    np.testing.assert_array_equal(np.sort(places), np.arange(count))


@given(
    count=st.integers(1, 10**11 // 128),
    key=st.binary(min_size=32, max_size=32),
    picks=st.lists(st.floats(0, 1), min_size=1),
)
@settings(max_examples=60)
def test_permuted_when_some_positions_are_given_then_as_when_each_is_given_alone(count, key, picks):
    positions = np.array([min(count - 1, int(pick * count)) for pick in picks], np.int64)
    places = permuted(positions, count, key)
    assert ((places >= 0) & (places < count)).all()
    alone = [int(permuted(positions[i : i + 1], count, key)[0]) for i in range(len(positions))]
    assert places.tolist() == alone
    assert len(set(places.tolist())) == len(set(positions.tolist()))


@pytest.mark.parametrize("count", [2, 3, 4, 10, 37])
def test_permuted_when_the_key_varies_then_each_position_goes_everywhere_equally_often(count):
    keys = 3000
    places = np.array([permuted(np.arange(count), count, key.to_bytes(8, "big")) for key in range(keys)])
    for position in range(min(count, 4)):
        assert chisquare(np.bincount(places[:, position], minlength=count)).pvalue > 1e-4
    pairs = places[:, 0] * count + places[:, 1]  # neighbours, independent but never equal
    seen = np.bincount(pairs, minlength=count**2).reshape(count, count)
    assert (np.diag(seen) == 0).all()
    assert chisquare(seen[~np.eye(count, dtype=bool)]).pvalue > 1e-4


def test_permuted_when_the_corpus_is_large_then_places_are_spread_and_uncorrelated():
    count = 10**11 // 128
    places = permuted(np.arange(20_000), count, b"key")
    assert chisquare(np.bincount(places * 50 // count, minlength=50)).pvalue > 1e-4
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.03


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two domains of the mix in several shards, so that sequences cross shards and domains."""
    folder = tmp_path_factory.mktemp("batches")
    rows = [{"text": f"row {i} says {i * i} and {i**3 % 977}", "part": "AB"[i % 2]} for i in range(300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Settings(
        text=SOURCE_TEXT.model_copy(update={"domain_column": "part"}),
        tokenizer=TrainedTokenizer(vocab_size=300, sample_bytes=100_000),
        shard_tokens=1000,
    )
    corpus_dir = folder / "corpus"
    return corpus_dir, prepare(str(folder / "rows.jsonl"), corpus_dir, settings=wanted)


def sequences(corpus, **changes):
    return TrainingSequences(*corpus, **{"context": CONTEXT, "seed": 0, "repeat": False, **changes})


def test_sequences_when_all_are_read_then_they_are_the_concatenated_mix_cut_at_every_context(corpus):
    corpus_dir, manifest = corpus
    train = [open_split(corpus_dir, domain, "train") for domain in manifest.mix]
    assert len(train) == 2
    assert all(len(manifest.split(domain, "train").files) > 1 for domain in manifest.mix)
    tokens = np.concatenate([split.read(0, split.tokens) for split in train])
    ordered = sequences(corpus)
    assert ordered.count == len(tokens) // CONTEXT
    expected = tokens[: ordered.count * CONTEXT].reshape(ordered.count, CONTEXT)
    found = ordered.read(0, ordered.count)
    assert found.shape == (ordered.count, CONTEXT)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_sequences_when_the_batch_size_changes_then_the_order_is_the_same_from_any_start(corpus, batch_size):
    whole = sequences(corpus).read(0, 96)
    for start in (0, 1, 13, 40):
        other = sequences(corpus)
        batches = [other.read(first, batch_size) for first in range(start, 96 - batch_size + 1, batch_size)]
        found = np.concatenate(batches)
        np.testing.assert_array_equal(found, whole[start : start + len(found)])


def test_sequences_when_the_seed_changes_then_another_order_of_the_same_sequences(corpus):
    first, second = sequences(corpus), sequences(corpus, seed=1)
    a, b = first.read(0, first.count), second.read(0, second.count)
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(a[np.lexsort(a.T)], b[np.lexsort(b.T)])


def test_sequences_when_the_end_is_passed_without_repeat_then_input_error_says_how_many_there_are(corpus):
    ordered = sequences(corpus)
    ordered.read(ordered.count - 1, 1)
    with pytest.raises(InputError, match=f"one pass has {ordered.count:,} sequences of 16 tokens"):
        ordered.read(ordered.count - 1, 2)


def test_sequences_when_repeat_is_set_then_each_pass_has_all_sequences_in_its_own_order(corpus):
    ordered = sequences(corpus, repeat=True)
    count = ordered.count
    passes = ordered.read(0, 2 * count)
    first, second = passes[:count], passes[count:]
    np.testing.assert_array_equal(first, sequences(corpus).read(0, count))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first[np.lexsort(first.T)], second[np.lexsort(second.T)])
    np.testing.assert_array_equal(ordered.read(count - 3, 6), passes[count - 3 : count + 3])


def test_sequences_when_one_domain_is_named_then_only_its_tokens(corpus):
    split = open_split(corpus[0], "B", "train")
    ordered = sequences(corpus, domains=["B"])
    assert ordered.count == split.tokens // CONTEXT


def test_sequences_when_the_corpus_is_shorter_than_the_context_then_input_error_says_so(corpus):
    with pytest.raises(InputError, match="do not fill one sequence"):
        sequences(corpus, context=1_000_000)
