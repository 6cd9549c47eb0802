"""Named collections of evaluation sets.

sweep file {suite: builtin} -> [suites: Suite] -> loss
in    a suite's name, the folder of prepared corpora, and what the checkpoint was trained on
out   the held-out splits of that corpus, each marked as in or out of the training distribution
not   torch; a suite never holds text that a model trained on

A prepared corpus is a suite of the same name; a published suite (trainers.corpus.SUITES) is a corpus all held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainers.config import Data, Imported
from trainers.corpus import SuiteText
from trainers.errors import InputError
from trainers.tokens import Manifest, read_manifest, tokenizer_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """One held-out split. in_distribution: it was split off the text that the checkpoint trained on; None: unknown."""

    domain: str
    split: str
    tokens: int
    documents: int
    in_distribution: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Evaluation sets of one corpus, in the order of its manifest."""

    name: str
    folder: Path
    manifest: Manifest
    sets: tuple[EvaluationSet, ...]

    @property
    def published(self) -> bool:
        """Whether it is a published suite, whose domains are called source/domain."""
        return isinstance(self.manifest.settings.text, SuiteText)

    @property
    def contamination(self) -> str | None:
        """Who may have trained on this text, as far as is known; None where the splits share no document."""
        text = self.manifest.settings.text
        return text.contamination if isinstance(text, SuiteText) else None


def open_suite(name: str, corpora: Path, trained_on: Data | Imported) -> Suite:
    """The suite, checked to be readable by a model that was trained on `trained_on`, or imported.

    corpora   folder of the prepared corpora
    raises    InputError if the corpus is missing or was made with another tokenizer; an empty split cannot be: its
              manifest would not be one
    """
    folder = corpora / name
    manifest = read_manifest(folder)
    own = isinstance(trained_on, Data) and manifest.digest == trained_on.digest
    if not own:
        _check_tokenizer(name, manifest, corpora, trained_on)
    sets = tuple(
        EvaluationSet(
            domain=split.domain,
            split=split.split,
            tokens=split.tokens,
            documents=split.documents,
            in_distribution=None if isinstance(trained_on, Imported) else own and split.role == "mix",
        )
        for split in manifest.splits
        if split.split == "heldout"
    )
    return Suite(name=name, folder=folder, manifest=manifest, sets=sets)


def only(suite: Suite, domains: Sequence[str]) -> Suite:
    """The suite with the evaluation sets of these domains."""
    return replace(suite, sets=tuple(one for one in suite.sets if one.domain in domains))


def _check_tokenizer(name: str, manifest: Manifest, corpora: Path, trained_on: Data | Imported) -> None:
    """Equal digests have equal tokenizers; another corpus must be cut into the tokens that the model knows."""
    if isinstance(trained_on, Data):
        record = read_manifest(corpora / trained_on.corpus).tokenizer
        same = record.sha256 == manifest.tokenizer.sha256
        owner, entries = trained_on.corpus, record.vocab_size
        advice = f"prepare '{name}' with the tokenizer of '{owner}'"
    elif trained_on.tokenizer is None:
        what = f"{trained_on.source}: imported without a tokenizer, no text can be given to it; nothing was evaluated"
        raise InputError(what)
    else:
        same = tokenizer_identity((corpora / name / "tokenizer.json").read_text()) == trained_on.tokenizer
        owner, entries = trained_on.source, trained_on.vocab_size
        advice = f"geosweep data prepare SOURCE --name {name} --tokenizer CHECKPOINT/tokenizer.json"
    if not same:
        raise InputError(
            f"suite '{name}' is cut by another tokenizer than the checkpoint was trained with, nothing was evaluated",
            [
                f"{name}: tokenizer of {manifest.tokenizer.vocab_size:,} entries, from {manifest.tokenizer.source}",
                f"checkpoint: tokenizer of {entries:,} entries, that of {owner}",
            ],
            advice,
        )
