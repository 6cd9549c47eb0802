"""How well a model predicts each evaluation set of a suite: token loss and bits per byte.

checkpoint -> model, suite -> [loss] -> metric values
in    a model and a suite that its tokenizer made
out   for each domain: loss, bits_per_byte, and in their convention the counts that any other unit follows from
not   gradients, sampling, chance: the first tokens_per_domain tokens of each split, in the order of its documents

The tokens are cut into sequences of the model's context, documents packed one after the other as in training. A
sequence of T tokens has T - 1 predictions. Bytes are those of exactly the predicted tokens, so bits per byte compares
models with different tokenizers.

Letters: S sequences, T tokens of a sequence, N predictions, D hidden size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from evaluators.config import LossSettings
from evaluators.metrics import MetricValue, Plain, metric_value
from evaluators.suites import EvaluationSet, Suite
from trainers.errors import InputError
from trainers.head import token_losses
from trainers.model import body, unembedding
from trainers.tokens import load_tokenizer, open_split

if TYPE_CHECKING:
    from trainers.model import Network

_TOKENS_PER_FORWARD = 2048  # bounds the memory of a forward pass; a constant, since the last bits depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCounts:
    """Size of the text that some tokens stand for: UTF-8 bytes, characters, words (between white space)."""

    bytes: int
    characters: int
    words: int


def suite_losses(
    network: Network, suite: Suite, settings: LossSettings, context: int, device: str
) -> list[MetricValue]:
    """Token loss and bits per byte of every evaluation set; of a published suite, of its sources too.

    context    tokens of a sequence, at most the model's own
    raises     InputError if tokens_per_domain is not a whole number of contexts, a split has fewer tokens, or a loss is
               not finite
    """
    _check_lengths(suite, settings, context)
    pieces = token_bytes(load_tokenizer(suite.folder))
    network = network.to(device).eval()
    values = [value for one in suite.sets for value in _set_values(network, suite, one, settings, context, pieces)]
    return [*values, *_source_values(suite, values)]


def _check_lengths(suite: Suite, settings: LossSettings, context: int) -> None:
    if not suite.sets:
        raise InputError(f"suite '{suite.name}': no evaluation set, nothing was evaluated")
    asked = settings.tokens_per_domain
    if asked is None:
        return
    problems = [
        f"{one.domain}: {asked:,} tokens asked for, its held-out split has {one.tokens:,}"
        for one in suite.sets
        if one.tokens < asked
    ]
    if asked % context:
        near = [tokens for tokens in (asked - asked % context, asked + context - asked % context) if tokens]
        problems.append(f"{asked:,} is not a whole number of contexts of {context}; near: {near}")
    if problems:
        longest = min(one.tokens for one in suite.sets) // context * context
        raise InputError(
            f"suite '{suite.name}': tokens_per_domain does not fit, nothing was evaluated",
            problems,
            f"the longest that every domain has is {longest:,}; null takes all that each has",
        )


def _set_values(
    network: Network,
    suite: Suite,
    one: EvaluationSet,
    settings: LossSettings,
    context: int,
    pieces: tuple[bytes, ...] | None,
) -> list[MetricValue]:
    tokens = settings.tokens_per_domain or one.tokens // context * context
    convention: dict[str, Plain] = {
        "suite": suite.name,
        "corpus_digest": suite.manifest.digest,
        "in_distribution": one.in_distribution,
        "contamination": suite.contamination,
        "context": context,
        "sequences": tokens // context,
        "predictions": "tokens 2 to context of each sequence; documents packed",
        "logits": "every vocabulary row, padding included; float32",
    }
    if (reason := _too_little(one, context)) is not None:
        return _undefined(one, {**convention, "undefined": reason})
    ids_ST = open_split(suite.folder, one.domain, "heldout").read(0, tokens).reshape(-1, context)
    losses_N = sequence_losses(network, ids_ST)
    if not np.isfinite(losses_N).all():
        raise InputError(f"{one.domain}: {np.count_nonzero(~np.isfinite(losses_N)):,} token losses are nan or inf")
    n, nats = len(losses_N), float(losses_N.sum())
    counts = None if pieces is None else text_counts(ids_ST[:, 1:], pieces)
    if counts is not None:
        convention |= {"bytes": counts.bytes, "characters": counts.characters, "words": counts.words}
    named: Mapping[str, Any] = {"dataset": one.domain, "split": one.split, "n": n}
    return [
        metric_value("loss", nats / n, **named, convention=convention),
        _bits_per_byte(nats, counts, named, convention),
    ]


def _too_little(one: EvaluationSet, context: int) -> str | None:
    """Why a domain has no loss; one document says nothing of its domain."""
    if one.documents < 2:
        return f"domain '{one.domain}' has one held-out document"
    return f"domain '{one.domain}' has {one.tokens} tokens, less than one sequence" if one.tokens < context else None


def _undefined(one: EvaluationSet, convention: Mapping[str, Plain]) -> list[MetricValue]:
    named: Mapping[str, Any] = {"dataset": one.domain, "split": one.split, "n": 0}
    return [metric_value(name, None, **named, convention=convention) for name in ("loss", "bits_per_byte")]


def _source_values(suite: Suite, values: Sequence[MetricValue]) -> list[MetricValue]:
    """Over the domains of each source, and over all: every token counts alike (loss), every domain (loss_by_domain)."""
    if not suite.published:
        return []
    losses = [v for v in values if v.metric == "loss" and v.value is not None]
    sources = dict.fromkeys(str(v.dataset).partition("/")[0] for v in losses)
    groups = {source: [v for v in losses if str(v.dataset).startswith(f"{source}/")] for source in sources}
    if len(groups) > 1:
        groups[f"all of {suite.name}"] = losses
    return [value for name, members in groups.items() for value in _averages(name, members)]


def _averages(name: str, members: Sequence[MetricValue]) -> list[MetricValue]:
    known = [(v.value, v.n, v.convention) for v in members if v.value is not None and v.n]
    n = sum(count for _, count, _ in known)
    nats = sum(value * count for value, count, _ in known)
    shared = ("suite", "corpus_digest", "contamination", "context", "predictions", "logits")
    convention: dict[str, Plain] = {key: known[0][2][key] for key in shared} | {"domains": len(known)}
    counts = None
    if all("bytes" in c for _, _, c in known):
        sums = {key: sum(int(c[key] or 0) for _, _, c in known) for key in ("bytes", "characters", "words")}
        counts = TextCounts(**sums)
        convention |= sums
    named: Mapping[str, Any] = {"dataset": name, "split": "heldout", "n": n}
    by_domain: Mapping[str, Any] = {**named, "n": len(known)}
    return [
        metric_value("loss", nats / n, **named, convention=convention),
        _bits_per_byte(nats, counts, named, convention),
        metric_value("loss_by_domain", sum(v for v, _, _ in known) / len(known), **by_domain, convention=convention),
    ]


def _bits_per_byte(
    nats: float, counts: TextCounts | None, named: Mapping[str, Any], convention: Mapping[str, Plain]
) -> MetricValue:
    if counts is None or counts.bytes == 0:
        reason = "the tokenizer is not byte-level" if counts is None else "the predicted tokens have no text"
        return metric_value("bits_per_byte", None, **named, convention={**convention, "undefined": reason})
    return metric_value("bits_per_byte", nats / math.log(2) / counts.bytes, **named, convention=convention)


@torch.inference_mode()
def sequence_losses(network: Network, ids_ST: NDArray[np.int64]) -> NDArray[np.float64]:
    """The loss of every prediction in nats, (S * (T - 1),), sequence after sequence; never all logits at once.

    network    on its device, in evaluation mode
    """
    weight_VD = unembedding(network)
    inner = body(network)
    at_once = max(1, _TOKENS_PER_FORWARD // ids_ST.shape[1])
    losses = []
    for start in range(0, len(ids_ST), at_once):
        ids = torch.from_numpy(ids_ST[start : start + at_once]).to(weight_VD.device)
        hidden_STD = inner(input_ids=ids[:, :-1]).last_hidden_state
        losses.append(token_losses(hidden_STD.flatten(0, 1), weight_VD, ids[:, 1:].flatten()))
    losses_N: NDArray[np.float64] = torch.cat(losses).double().cpu().numpy()
    return losses_N


# ---- text of tokens ------------------------------------------------------------------------------------------------


def token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...] | None:
    """The bytes that each token id stands for; special tokens none. None if the tokenizer is not byte-level.

    source   Radford et al. 2019: a byte-level piece writes each byte as one printable character
    """
    written = json.loads(tokenizer.to_str())
    if not _is_byte_level(written["decoder"]):
        return None
    bytes_of_character = _byte_alphabet()
    pieces = [b""] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
    for piece, token in written["model"]["vocab"].items():
        pieces[token] = bytes(bytes_of_character[character] for character in piece)
    for added in written["added_tokens"]:
        # An added token is plain text, a special one stands for no text.
        pieces[added["id"]] = b"" if added["special"] else added["content"].encode()
    return tuple(pieces)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level piece is: itself where it prints, else 256 and up in byte order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


def text_counts(ids_ST: NDArray[np.int64], pieces: tuple[bytes, ...]) -> TextCounts:
    """Bytes, characters and words of exactly these tokens; a word that a sequence cuts counts in both."""
    size_V = np.array([len(piece) for piece in pieces])
    # A UTF-8 character begins with every byte that is not 10xxxxxx, so a token holds the characters that begin in it.
    begins_V = np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces])
    words = sum(len(_text(ids_T, pieces).split()) for ids_T in ids_ST)
    return TextCounts(bytes=int(size_V[ids_ST].sum()), characters=int(begins_V[ids_ST].sum()), words=words)


def _text(ids_T: NDArray[np.int64], pieces: tuple[bytes, ...]) -> str:
    """The text of some tokens, a space where a token has none: documents do not run into each other."""
    return b"".join(pieces[token] or b" " for token in ids_T.tolist()).decode(errors="replace")
