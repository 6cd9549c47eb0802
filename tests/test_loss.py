"""Losses against Hugging Face's own, text counts against the text itself, and suites that do not fit."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import hugging_face_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evaluators.config import LossSettings
from evaluators.loss import sequence_losses, suite_losses, text_counts, token_bytes
from evaluators.suites import only, open_suite
from trainers.config import Data
from trainers.corpus import SourceText
from trainers.errors import InputError
from trainers.scales import model_of
from trainers.tokens import Manifest, Settings, TrainedTokenizer, load_tokenizer, open_split, prepare, read_manifest

CONTEXT = 32
WORDS = ["the", "effective", "rank", "naïve", "façade", "東京", "Ωμέγα", "🙂", "weight\tdecay\n", "loss"]


def write_texts(path: Path, seed: int, domains: tuple[str, ...] = ("prose", "code")) -> Path:
    """120 documents a domain of words of one to four bytes a character."""
    rng = random.Random(seed)
    rows = [
        {"domain": domain, "text": f"{domain} {i}: " + " ".join(rng.choices(WORDS, k=rng.randint(20, 60)))}
        for domain in domains
        for i in range(120)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def make_corpus(folder: Path, texts: Path, tokenizer: TrainedTokenizer | str) -> Manifest:
    text = SourceText(text_column="text", domain_column="domain", hub_split="train", max_bytes=None, heldout_percent=30)
    return prepare(str(texts), folder, settings=Settings(text=text, tokenizer=tokenizer, shard_tokens=4096))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lib; same-tokens: other text, the tokenizer of lib; other-tokens: another tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    texts, more = write_texts(folder / "texts.jsonl", seed=1), write_texts(folder / "more.jsonl", seed=2)
    make_corpus(folder / "lib", texts, TrainedTokenizer(vocab_size=300, sample_bytes=100_000))
    make_corpus(folder / "same-tokens", more, str(folder / "lib" / "tokenizer.json"))
    make_corpus(folder / "other-tokens", more, TrainedTokenizer(vocab_size=310, sample_bytes=100_000))
    return folder


def data_of(corpora: Path) -> Data:
    return Data(corpus="lib", digest=read_manifest(corpora / "lib").digest, repeat=False)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    model = model_of(
        "olmo", "tiny-32", context=CONTEXT, vocab_size=300, attention="sequential", tied=False, init_std=0.3
    )
    return hugging_face_model(model, seed=3).eval()


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequences", [1, 5, 130])
def test_losses_are_those_of_the_whole_logits(network: torch.nn.Module, sequences: int) -> None:
    ids = np.random.default_rng(0).integers(0, 300, (sequences, CONTEXT))  # 130: more than one forward pass
    with torch.no_grad():
        logits = network(input_ids=torch.from_numpy(ids)).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), torch.from_numpy(ids)[:, 1:].flatten(), reduction="none"
        )
        labelled = network(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(ids)).loss
    found = sequence_losses(network, ids)
    assert found.shape == (sequences * (CONTEXT - 1),)
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=1e-5)
    assert found.mean() == pytest.approx(float(labelled), rel=1e-5)


def test_suite_without_an_evaluation_set_is_refused(network: torch.nn.Module, corpora: Path) -> None:
    nothing = only(open_suite("lib", corpora, data_of(corpora)), [])
    with pytest.raises(InputError, match="'lib': no evaluation set"):
        suite_losses(network, nothing, LossSettings(suite="lib"), CONTEXT, "cpu")


def test_suite_values_follow_from_the_losses_and_the_text(network: torch.nn.Module, corpora: Path) -> None:
    suite = open_suite("lib", corpora, data_of(corpora))
    values = suite_losses(network, suite, LossSettings(suite="lib", tokens_per_domain=40 * CONTEXT), CONTEXT, "cpu")
    assert [(v.metric, v.dataset) for v in values] == [
        (metric, domain) for domain in ("prose", "code") for metric in ("loss", "bits_per_byte")
    ]
    tokenizer = load_tokenizer(corpora / "lib")
    for loss, bits in zip(values[::2], values[1::2], strict=True):
        ids = open_split(corpora / "lib", loss.dataset, "heldout").read(0, 40 * CONTEXT).reshape(-1, CONTEXT)
        losses = sequence_losses(network, ids)
        assert loss.value == pytest.approx(losses.mean(), rel=1e-12)
        assert (loss.n, loss.split) == (40 * (CONTEXT - 1), "heldout")
        size = sum(len(bytes_by_decoding(tokenizer, ids_T)) for ids_T in ids[:, 1:])
        assert bits.convention["bytes"] == size
        assert bits.value == pytest.approx(losses.sum() / math.log(2) / size, rel=1e-12)
        assert bits.convention["in_distribution"] is True


def bytes_by_decoding(tokenizer: Tokenizer, ids: np.ndarray) -> bytes:
    """The text's bytes through the tokenizer's own table of characters, special tokens left out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [ord(c) for c in alphabet if ord(c) < 256]
    moved = {
        c: b for c, b in zip([c for c in alphabet if ord(c) >= 256], sorted(set(range(256)) - set(plain)), strict=True)
    }
    pieces = [tokenizer.id_to_token(int(i)) for i in ids if i != 0]
    return bytes(moved.get(c, ord(c)) for piece in pieces for c in piece)


def test_losses_are_the_same_bits_again(network: torch.nn.Module, corpora: Path) -> None:
    suite = open_suite("lib", corpora, data_of(corpora))
    settings = LossSettings(suite="lib", tokens_per_domain=20 * CONTEXT)
    first, second = (suite_losses(network, suite, settings, CONTEXT, "cpu") for _ in range(2))
    assert first == second


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corpus", ["lib", "same-tokens", "other-tokens"])
def test_counts_of_whole_documents_are_those_of_the_text(corpora: Path, corpus: str) -> None:
    pieces = token_bytes(load_tokenizer(corpora / corpus))
    assert pieces is not None
    for split in read_manifest(corpora / corpus).splits:
        ids = open_split(corpora / corpus, split.domain, split.split).read(0, split.tokens)
        counts = text_counts(ids[None, :], pieces)
        assert (counts.bytes, counts.characters, counts.words) == (split.bytes, split.characters, split.words)


def test_every_byte_has_a_piece_and_end_of_text_has_none(corpora: Path) -> None:
    pieces = token_bytes(load_tokenizer(corpora / "lib"))
    assert pieces is not None
    assert pieces[0] == b""
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)


def test_added_tokens_count_their_text_and_special_ones_nothing(corpora: Path) -> None:
    tokenizer = load_tokenizer(corpora / "lib")
    tokenizer.add_tokens(["    é"])
    tokenizer.add_special_tokens(["<pad>"])
    pieces = token_bytes(tokenizer)
    assert pieces is not None
    assert pieces[tokenizer.token_to_id("    é")] == "    é".encode()
    assert pieces[tokenizer.token_to_id("<pad>")] == b""


def test_tokenizer_that_is_not_byte_level_has_no_bytes() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert token_bytes(words) is None
    words.decoder = decoders.Sequence([decoders.Fuse(), decoders.WordPiece()])
    assert token_bytes(words) is None


def test_words_are_not_joined_over_the_end_of_a_document() -> None:
    pieces = (b"", b"one", b" two")
    counts = text_counts(np.array([[1, 0, 1, 2]]), pieces)
    assert (counts.bytes, counts.characters, counts.words) == (10, 10, 3)


# ---- suites ----------------------------------------------------------------------------------------------------------


def test_suite_of_the_training_corpus_is_in_distribution_and_another_is_not(corpora: Path) -> None:
    own = open_suite("lib", corpora, data_of(corpora))
    other = open_suite("same-tokens", corpora, data_of(corpora))
    assert [(one.domain, one.split, one.in_distribution) for one in own.sets] == [
        ("prose", "heldout", True),
        ("code", "heldout", True),
    ]
    assert not any(one.in_distribution for one in other.sets)


def test_suite_with_another_tokenizer_is_refused(corpora: Path) -> None:
    with pytest.raises(InputError, match="another tokenizer") as caught:
        open_suite("other-tokens", corpora, data_of(corpora))
    assert "310 entries" in caught.value.problems[0]
    assert "300 entries" in caught.value.problems[1]


def test_suite_that_is_not_there_is_refused_with_the_command_that_makes_it(corpora: Path) -> None:
    with pytest.raises(InputError, match="no corpus 'pile'") as caught:
        open_suite("pile", corpora, data_of(corpora))
    assert caught.value.next_step.endswith("geosweep data prepare pile")


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (CONTEXT + 1, "33 is not a whole number of contexts of 32; near: [32, 64]"),
        (32 * 10**6, "its held-out split has"),
    ],
    ids=["no-whole-context", "too-long"],
)
def test_tokens_per_domain_that_does_not_fit_is_refused(
    network: torch.nn.Module, corpora: Path, tokens: int, says: str
) -> None:
    suite = open_suite("lib", corpora, data_of(corpora))
    with pytest.raises(InputError) as caught:
        suite_losses(network, suite, LossSettings(suite="lib", tokens_per_domain=tokens), CONTEXT, "cpu")
    assert says in str(caught.value)
