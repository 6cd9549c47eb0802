"""The small built-in corpus of the tests: real text, a vocabulary of 500."""

from __future__ import annotations

from trainers.corpus import BUILTIN_TEXT
from trainers.tokens import Settings, TrainedTokenizer

SMALL_TEXT = BUILTIN_TEXT.model_copy(
    update={
        "domains": tuple(
            domain.model_copy(update={"max_bytes": 600_000 if domain.role == "mix" else 150_000})
            for domain in BUILTIN_TEXT.domains
        ),
        "max_characters": 10_000,
    }
)
SMALL = Settings(text=SMALL_TEXT, tokenizer=TrainedTokenizer(vocab_size=500, sample_bytes=200_000), shard_tokens=2**26)
