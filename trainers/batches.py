"""(data digest, seed, position) to token ids; starts anywhere without replay.

tokens -> [batches] -> model -> loop
in    the train splits of a corpus, memory mapped
out   ids (B, T): sequence i is a function of (digest, seed, i) alone, so a batch is the next B of them whatever B is
not   state: nothing has to be saved or replayed to go on at sequence i

Letters: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainers.errors import InputError
from trainers.tokens import Manifest, TokenSplit, open_split

_ROUNDS = 8  # twice the 4 of the Luby-Rackoff proof: its halves are wide, those of a small corpus are not


def permuted(positions: NDArray[np.int64], count: int, key: bytes) -> NDArray[np.int64]:
    """Where each position goes in the permutation of 0 to count - 1 that the key selects; random access, no table.

    positions   (n,), each in [0, count)
    returns     (n,) int64; different positions go to different places
    source      balanced Feistel network (Luby & Rackoff 1988) over the next even power of two, walked until the value
                is below count (cycle walking: Black & Rogaway 2002; at most 4 steps on average); rounds mixed by the
                finalizer of splitmix64 (Steele et al. 2014)
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    values = _feistel(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


def _round_keys(key: bytes) -> NDArray[np.uint64]:
    digests = (hashlib.sha256(key + bytes([round_number])).digest() for round_number in range(_ROUNDS))
    return np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mixed(right ^ round_key) & mask)
    return left << bits | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class TrainingSequences:
    """The training sequences of a corpus in the order of one seed; holds its token files open.

    One pass cuts the train splits, one after the other, into sequences of T tokens; the tokens that do not fill a last
    one are left out. Each pass has an order of its own.
    """

    def __init__(
        self,
        corpus_dir: Path,
        manifest: Manifest,
        *,
        context: int,
        seed: int,
        repeat: bool,
        domains: Sequence[str] | None = None,
    ) -> None:
        """context is T, in tokens. repeat: whether there is a second pass. domains: None for the pre-training mix.

        raises   InputError if the splits do not fill one sequence; as open_split for a missing or damaged corpus
        """
        self._name, self._digest, self._seed, self._repeat = manifest.name, manifest.digest, seed, repeat
        self._context = context
        self._splits: list[TokenSplit] = [
            open_split(corpus_dir, domain, "train") for domain in (manifest.mix if domains is None else domains)
        ]
        self._starts = np.concatenate([[0], np.cumsum([split.tokens for split in self._splits])]).astype(np.int64)
        self.count = int(self._starts[-1]) // context
        """Sequences in one pass."""
        if self.count == 0:
            raise InputError(
                f"corpus '{self._name}': {int(self._starts[-1]):,} training tokens do not fill one sequence",
                [f"context: {context:,}"],
                "use a shorter context or a larger corpus",
            )

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Sequences first to first + count of the order: ids (count, T).

        raises   InputError past the end of the first pass, unless the corpus may repeat
        """
        if first + count > self.count and not self._repeat:
            raise InputError(
                f"corpus '{self._name}' ends before sequence {first + count:,}",
                [f"one pass has {self.count:,} sequences of {self._context:,} tokens"],
                "use a smaller token_budget or a larger corpus, or set repeat to pass over the data again",
            )
        ids = np.empty((count, self._context), np.int64)
        for row, place in enumerate(self._places(first, count).tolist()):
            ids[row] = self._read_tokens(place * self._context)
        return ids

    def _places(self, first: int, count: int) -> NDArray[np.int64]:
        """For each sequence of the order, which one of the corpus it is."""
        order = np.arange(first, first + count, dtype=np.int64)
        passes = order // self.count
        places = np.empty_like(order)
        for number in np.unique(passes).tolist():
            of_pass = passes == number
            places[of_pass] = permuted(order[of_pass] % self.count, self.count, self._key(number))
        return places

    def _key(self, pass_number: int) -> bytes:
        numbers = self._seed.to_bytes(16, "big") + pass_number.to_bytes(8, "big")
        return hashlib.sha256(b"geosweep order v1" + bytes.fromhex(self._digest) + numbers).digest()

    def _read_tokens(self, start: int) -> NDArray[np.int64]:
        """T tokens of the concatenated splits."""
        stop = start + self._context
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        pieces = [
            split.read(max(0, start - offset), min(split.tokens, stop - offset))
            for split, offset in zip(self._splits[first:last], self._starts[first:last].tolist(), strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
