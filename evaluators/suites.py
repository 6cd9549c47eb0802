"""Named collections of evaluation sets.

sweep file {suite: builtin} -> [suites: Suite] -> loss
in    a suite's name, the folder of prepared corpora, and what the checkpoint was trained on
out   the held-out splits of that corpus, each marked as in or out of the training distribution
not   torch; a suite never holds text that a model trained on

A prepared corpus is a suite of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainers.config import Data
from trainers.errors import InputError
from trainers.tokens import Manifest, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """One held-out split. in_distribution: it was split off the very text that the checkpoint trained on."""

    domain: str
    split: str
    tokens: int
    in_distribution: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Evaluation sets of one corpus, in the order of its manifest."""

    name: str
    folder: Path
    manifest: Manifest
    sets: tuple[EvaluationSet, ...]


def open_suite(name: str, corpora: Path, trained_on: Data) -> Suite:
    """The suite, checked to be readable by a model that was trained on `trained_on`.

    corpora   folder of the prepared corpora
    raises    InputError if the corpus is missing or was made with another tokenizer; an empty split cannot be: its
              manifest would not be one
    """
    folder = corpora / name
    manifest = read_manifest(folder)
    if manifest.digest != trained_on.digest:
        _check_tokenizer(name, manifest, corpora, trained_on)
    sets = tuple(
        EvaluationSet(
            domain=split.domain,
            split=split.split,
            tokens=split.tokens,
            in_distribution=split.role == "mix" and manifest.digest == trained_on.digest,
        )
        for split in manifest.splits
        if split.split == "heldout"
    )
    return Suite(name=name, folder=folder, manifest=manifest, sets=sets)


def _check_tokenizer(name: str, manifest: Manifest, corpora: Path, trained_on: Data) -> None:
    """Equal digests have equal tokenizers; another corpus must be cut into the tokens that the model knows."""
    known = read_manifest(corpora / trained_on.corpus).tokenizer
    if manifest.tokenizer.sha256 != known.sha256:
        raise InputError(
            f"suite '{name}' is cut by another tokenizer than the checkpoint was trained with, nothing was evaluated",
            [
                f"{name}: tokenizer {manifest.tokenizer.sha256[:12]}, {manifest.tokenizer.vocab_size:,} entries",
                f"{trained_on.corpus} (trained on): tokenizer {known.sha256[:12]}, {known.vocab_size:,} entries",
            ],
            f"prepare '{name}' with the tokenizer of '{trained_on.corpus}'",
        )
