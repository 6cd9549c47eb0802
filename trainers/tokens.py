"""Documents to token files with a manifest, and token files to arrays.

source -> corpus -> [tokens] -> batches -> model
in    Documents (corpus.py), a tokenizer: trained here on the training split, or any that exists
out   a folder: tokenizer.json, <domain>-<split>-00000.npy shards, an index of held-out documents, manifest.json last.
      Without its manifest the folder does not exist: it is written again
not   torch, transformers, datasets: the planner reads manifests through this module; what needs them imports them late
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions, version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from trainers.config import Count, Frozen, NonNegative, PositiveInt
from trainers.corpus import (
    BUILTIN_TEXT,
    SOURCE_TEXT,
    SUITES,
    BuiltinText,
    Document,
    Role,
    SourceText,
    SplitName,
    SuiteText,
    read_documents,
)
from trainers.errors import EnvironmentFault, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT_VERSION = 1
END_OF_TEXT = "<|endoftext|>"
_ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>")


# --- the manifest ----------------------------------------------------------------------------------------------------


class TrainedTokenizer(Frozen):
    """A byte-level BPE tokenizer trained on the training split of the mix, on its first sample_bytes of text."""

    vocab_size: PositiveInt
    sample_bytes: PositiveInt


class Settings(Frozen):
    """Everything that a person chooses about a corpus.

    tokenizer      how to train one, or the path of a tokenizer.json, or the id of a tokenizer on the Hugging Face hub
    shard_tokens   most tokens in one file
    """

    text: BuiltinText | SourceText | SuiteText
    tokenizer: TrainedTokenizer | str
    shard_tokens: PositiveInt


class TokenFile(Frozen):
    """One .npy file of the corpus folder. rows: tokens of a shard, documents of an index; bytes: size of the file."""

    path: str
    sha256: str
    rows: Count
    dtype: str
    bytes: Count


class Share(Frozen):
    """What one collection or licence contributes to a split. bytes: UTF-8 text."""

    name: str
    documents: Count
    bytes: Count


class Split(Frozen):
    """The tokens of one domain and split, its documents one after the other, each followed by end-of-text.

    index             held-out splits only: for each document the position after its last token, and its own bytes,
                      characters and words; (documents, 4) int64
    tokens            with the end-of-text tokens
    bytes             UTF-8 text, without end-of-text; characters, words (split at white space) likewise
    unigram_entropy   nats a token, of this split's own token frequencies: the loss of a model that knows only those
    """

    domain: str
    split: SplitName
    role: Role
    files: tuple[TokenFile, ...]
    index: TokenFile | None
    tokens: PositiveInt
    documents: PositiveInt
    bytes: PositiveInt
    characters: PositiveInt
    words: Count
    unigram_entropy: NonNegative
    sources: tuple[Share, ...]
    licences: tuple[Share, ...]


class TokenizerRecord(Frozen):
    """tokenizer.json of the corpus. source: "trained", or the path or hub id it was given as."""

    source: str
    sha256: str
    vocab_size: PositiveInt
    end_of_text: Count


class Environment(Frozen):
    """Where the corpus was made. packages_sha256: of the sorted "name==version" lines of all installed packages."""

    created: datetime
    python: str
    platform: str
    tokenizers: str
    packages: Count
    packages_sha256: str


class Manifest(Frozen):
    """What a corpus folder holds.

    digest   sha256 (hex) of all that determines the tokens: tokenizer, shards, splits, their order; no dates
    """

    format_version: PositiveInt
    name: str
    digest: str
    source: str
    settings: Settings
    tokenizer: TokenizerRecord
    splits: tuple[Split, ...]
    environment: Environment

    def split(self, domain: str, split: SplitName) -> Split:
        """raises InputError if the corpus has no such domain"""
        for candidate in self.splits:
            if (candidate.domain, candidate.split) == (domain, split):
                return candidate
        known = ", ".join(self.domains)
        raise InputError(f"corpus '{self.name}' has no {split} split of domain '{domain}'", [f"domains: {known}"])

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(split.domain for split in self.splits))

    @property
    def mix(self) -> tuple[str, ...]:
        """Domains of the pre-training mix."""
        return tuple(dict.fromkeys(split.domain for split in self.splits if split.role == "mix"))


def _digest(tokenizer: TokenizerRecord, splits: Sequence[Split]) -> str:
    content = {
        "tokenizer": [tokenizer.sha256, tokenizer.vocab_size, tokenizer.end_of_text],
        "splits": [[s.domain, s.split, s.role, [[f.sha256, f.rows, f.dtype] for f in _files_of(s)]] for s in splits],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _files_of(split: Split) -> tuple[TokenFile, ...]:
    return (*split.files, split.index) if split.index else split.files


def read_manifest(corpus_dir: Path) -> Manifest:
    """The manifest of a corpus.

    raises   InputError if there is no corpus or its format is newer; EnvironmentFault if the manifest is damaged
    """
    path = corpus_dir / "manifest.json"
    if not path.exists():
        raise InputError(
            f"no corpus '{corpus_dir.name}' at {corpus_dir}",
            next_step=f"make it: geosweep data prepare {corpus_dir.name}",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format_version"] > FORMAT_VERSION:
            raise InputError(
                f"{path}: its format {content['format_version']} is newer than {FORMAT_VERSION}, the newest known here",
                next_step="use the geosweep version that made it, or a newer one",
            )
        return Manifest.model_validate_json(json.dumps(content))
    except (json.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise EnvironmentFault(
            "corrupt_file",
            f"{path}: not a manifest: {error}",
            f"make the corpus again: geosweep data prepare {corpus_dir.name} --again",
        ) from error


# --- reading ---------------------------------------------------------------------------------------------------------


class TokenSplit:
    """The tokens of one split, memory mapped; positions run on over the shards."""

    def __init__(self, maps: Sequence[NDArray[Any]], index: NDArray[np.int64] | None) -> None:
        self._maps = tuple(maps)
        self._starts = np.concatenate([[0], np.cumsum([len(shard) for shard in maps])]).astype(np.int64)
        self._index = index

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start to stop (excluded); a copy of shape (stop - start,). raises IndexError outside 0 to tokens"""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a split of {self.tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        if first < len(self._maps) and stop <= self._starts[first + 1]:
            offset = int(self._starts[first])
            return self._maps[first][start - offset : stop - offset].astype(np.int64)
        pieces = [
            shard[max(0, start - offset) : max(0, stop - offset)]
            for shard, offset in zip(self._maps, self._starts[:-1].tolist(), strict=True)
        ]
        return np.concatenate(pieces).astype(np.int64)

    def documents(self) -> NDArray[np.int64]:
        """(documents, 4): position after the last token, bytes, characters, words of each. Held-out splits only."""
        if self._index is None:
            raise ValueError("only held-out splits have an index of documents")
        return self._index


def open_split(corpus_dir: Path, domain: str, split: SplitName) -> TokenSplit:
    """Open a split for reading; checks that each file is there and has its size (verify checks the content).

    raises   InputError if there is no such corpus or domain; EnvironmentFault if a file is missing or cut
    """
    manifest = read_manifest(corpus_dir)
    record = manifest.split(domain, split)
    for file in _files_of(record):
        _check_size(corpus_dir, file, manifest)
    maps = [np.load(corpus_dir / file.path, mmap_mode="r", allow_pickle=False) for file in record.files]
    index = np.load(corpus_dir / record.index.path, allow_pickle=False) if record.index else None
    return TokenSplit(maps, index)


def verify(corpus_dir: Path) -> Manifest:
    """Read every file and compare its sha256 with the manifest. raises EnvironmentFault that names the first bad one"""
    manifest = read_manifest(corpus_dir)
    _check_content(corpus_dir / "tokenizer.json", manifest.tokenizer.sha256, manifest)
    for split in manifest.splits:
        for file in _files_of(split):
            _check_size(corpus_dir, file, manifest)
            _check_content(corpus_dir / file.path, file.sha256, manifest)
    return manifest


def load_tokenizer(corpus_dir: Path) -> Tokenizer:
    """The tokenizer that made the corpus. raises EnvironmentFault if its file is missing or changed"""
    from tokenizers import Tokenizer

    manifest = read_manifest(corpus_dir)
    path = corpus_dir / "tokenizer.json"
    _check_content(path, manifest.tokenizer.sha256, manifest)
    return Tokenizer.from_file(str(path))


def tokenizer_identity(tokenizer_json: str) -> str:
    """sha256 (hex) of how a tokenizer cuts text; what it adds or cuts off afterwards is not used here and left out."""
    content = json.loads(tokenizer_json)
    for afterwards in ("truncation", "padding", "post_processor"):
        content.pop(afterwards, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_content(path: Path, sha256: str, manifest: Manifest) -> None:
    if not path.exists():
        raise _corrupt(path, "the file is missing", manifest)
    if (found := _sha256(path)) != sha256:
        raise _corrupt(path, f"sha256 is {found}, the manifest says {sha256}", manifest)


def _check_size(corpus_dir: Path, file: TokenFile, manifest: Manifest) -> None:
    path = corpus_dir / file.path
    if not path.exists():
        raise _corrupt(path, "the file is missing", manifest)
    if (found := path.stat().st_size) != file.bytes:
        raise _corrupt(path, f"{found:,} bytes, the manifest says {file.bytes:,}", manifest)


def _corrupt(path: Path, what: str, manifest: Manifest) -> EnvironmentFault:
    return EnvironmentFault(
        "corrupt_file",
        f"{path}: {what}",
        f"make the corpus again in the same place: geosweep data prepare {manifest.source} --again",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- preparing -------------------------------------------------------------------------------------------------------


def default_settings(source: str) -> Settings:
    """What `geosweep data prepare SOURCE` takes where the caller names nothing else."""
    return Settings(
        text=BUILTIN_TEXT if source == "builtin" else SUITES.get(source, SOURCE_TEXT),
        # 2,000 entries: the model pads its rows to 2,048, and the embeddings of the smallest scales stay small
        tokenizer=TrainedTokenizer(vocab_size=2000, sample_bytes=4_000_000),
        shard_tokens=2**26,
    )


def prepare(
    source: str,
    corpus_dir: Path,
    *,
    settings: Settings | None = None,
    again: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Make the corpus of a source in a folder, or find that it is already there.

    source      "builtin", the name of a published suite (corpus.SUITES), "hf:OWNER/NAME" or "hf:OWNER/NAME/CONFIG", or
                the path of a text, JSONL or Parquet file or of a folder of them
    corpus_dir  its last part is the corpus's name
    settings    None: default_settings(source)
    again       make it again, although it is there; several processes may call this at once, then one works
    raises      InputError if the source cannot be read, a split stays empty, or the folder holds a corpus of another
                source or other settings; EnvironmentFault if the disk is full (the corpus then does not exist)
    """
    wanted = settings or default_settings(source)
    if not again and _exists(corpus_dir):
        return _same(read_manifest(corpus_dir), source, wanted)
    corpus_dir.mkdir(parents=True, exist_ok=True)
    with _only_writer(corpus_dir, progress), _full_disk_is_explained(corpus_dir):
        if not again and _exists(corpus_dir):
            return _same(read_manifest(corpus_dir), source, wanted)
        _remove_old_files(corpus_dir)
        return _write_corpus(source, corpus_dir, wanted, progress)


def _exists(corpus_dir: Path) -> bool:
    return (corpus_dir / "manifest.json").exists()


def _same(manifest: Manifest, source: str, wanted: Settings) -> Manifest:
    """The manifest, if it is of this source and these settings. raises InputError that names each difference"""
    before = {"source": manifest.source, **manifest.settings.model_dump()}
    after = {"source": source, **wanted.model_dump()}
    problems = [f"{key}: {before[key]!r} there, {after[key]!r} asked for" for key in after if before[key] != after[key]]
    if problems:
        raise InputError(
            f"corpus '{manifest.name}' exists with other settings; nothing was changed",
            problems,
            "prepare under another name, or replace it with --again",
        )
    return manifest


@contextmanager
def _only_writer(corpus_dir: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """One process at a time; the kernel frees the lock of one that dies."""
    with (corpus_dir / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{corpus_dir}: another process is preparing it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _full_disk_is_explained(corpus_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EnvironmentFault(
            "storage_error",
            f"{corpus_dir}: {error.strerror} while the corpus was written; it has no manifest, so it does not exist",
            "free some space, then give the same command again",
        ) from error


_OUR_FILE = re.compile(r".+-(train|heldout)-(\d{5,}|index)\.npy(\.partial)?|(tokenizer|manifest)\.json(\.partial)?")


def _remove_old_files(corpus_dir: Path) -> None:
    """What an earlier or a killed prepare left; the manifest first, and never a file that is not ours."""
    (corpus_dir / "manifest.json").unlink(missing_ok=True)
    for path in corpus_dir.iterdir():
        if _OUR_FILE.fullmatch(path.name):
            path.unlink()


def _write_corpus(source: str, corpus_dir: Path, settings: Settings, progress: Callable[[str], None]) -> Manifest:
    if isinstance(settings.text, SuiteText) and isinstance(settings.tokenizer, TrainedTokenizer):
        raise InputError(
            f"{source}: a suite of evaluation sets teaches no tokenizer, nothing was written",
            next_step="give that of the models: --tokenizer STORE/corpora/NAME/tokenizer.json",
        )
    documents: Iterator[Document] = read_documents(source, settings.text)
    if isinstance(settings.tokenizer, TrainedTokenizer):
        sample = list(_head_of_mix(documents, settings.tokenizer.sample_bytes))
        progress(f"training a tokenizer of {settings.tokenizer.vocab_size:,} entries")
        tokenizer = train_tokenizer(sample, settings.tokenizer.vocab_size)
        documents, origin, end_of_text = chain(sample, documents), "trained", 0
    else:
        tokenizer, end_of_text = _existing_tokenizer(settings.tokenizer)
        origin = settings.tokenizer
    tokenizer_path = corpus_dir / "tokenizer.json"
    _publish(tokenizer_path, tokenizer.to_str().encode())
    record = TokenizerRecord(
        source=origin,
        sha256=_sha256(tokenizer_path),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        end_of_text=end_of_text,
    )
    splits = _write_splits(documents, tokenizer, record, corpus_dir, settings.shard_tokens, progress)
    _refuse_empty_splits(source, splits, settings)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=corpus_dir.name,
        digest=_digest(record, splits),
        source=source,
        settings=settings,
        tokenizer=record,
        splits=splits,
        environment=_environment(),
    )
    _publish(corpus_dir / "manifest.json", manifest.model_dump_json(indent=1).encode())
    progress(f"{corpus_dir}: {len(splits)} splits, digest {manifest.digest[:12]}")
    return manifest


def _refuse_empty_splits(source: str, splits: Sequence[Split], settings: Settings) -> None:
    if not splits:
        raise InputError(f"{source}: no text found; nothing was written")
    have = {(split.domain, split.split) for split in splits}
    names: tuple[SplitName, ...] = ("heldout",) if isinstance(settings.text, SuiteText) else ("train", "heldout")
    missing = [(s.domain, name) for s in splits for name in names if (s.domain, name) not in have]
    if missing:
        raise InputError(
            f"{source}: too few documents to split; the corpus has no manifest, so it does not exist",
            [f"domain '{domain}': no document fell into its {name} split" for domain, name in missing],
            "give more documents (a document is a row, or a .txt or .md file), or another heldout_percent",
        )


def _environment() -> Environment:
    lines = sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()})
    return Environment(
        created=datetime.now(UTC),
        python=platform.python_version(),
        platform=platform.platform(),
        tokenizers=version("tokenizers"),
        packages=len(lines),
        packages_sha256=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
    )


# --- tokenizers ------------------------------------------------------------------------------------------------------


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Byte-level BPE on the training split of the mix alone; every text has tokens, end-of-text is id 0.

    raises   InputError if the text yields fewer than vocab_size entries
    source   Sennrich et al. 2016 (BPE); Radford et al. 2019 (on bytes)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents if _teaches_tokenizer(d)), trainer)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise InputError(
            "the tokenizer was not trained",
            [f"vocab_size: {vocab_size:,} asked for, the training split of the mix yields {found:,}"],
            f"give more text, or a vocab_size of 257 to {found:,}",
        )
    return tokenizer


def _teaches_tokenizer(document: Document) -> bool:
    return document.split == "train" and document.role == "mix"


def _head_of_mix(documents: Iterator[Document], sample_bytes: int) -> Iterator[Document]:
    """The first documents, until those of them that may teach a tokenizer hold sample_bytes of text."""
    taken_bytes = 0
    for document in documents:
        yield document
        taken_bytes += len(document.text.encode()) if _teaches_tokenizer(document) else 0
        if taken_bytes >= sample_bytes:
            return


def _existing_tokenizer(path_or_id: str) -> tuple[Tokenizer, int]:
    """A tokenizer and its end-of-text id. raises InputError if it cannot be read or has no end-of-text"""
    read = _file_tokenizer if path_or_id.endswith(".json") else _hub_tokenizer
    tokenizer, end_of_text = read(path_or_id)
    if end_of_text is None:
        raise InputError(
            f"{path_or_id}: the tokenizer has no end-of-text token", [f"known: {', '.join(_ENDS_OF_TEXT)}"]
        )
    # a tokenizer may carry the lengths that its model was trained with; documents have to stay whole
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, end_of_text


def _file_tokenizer(path: str) -> tuple[Tokenizer, int | None]:
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise InputError(f"{path}: no such tokenizer", next_step="give a tokenizer.json, or the id of one on the hub")
    try:
        known = "model" in json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        known = False
    if not known:
        raise InputError(f"{path}: not a tokenizer of the tokenizers library")
    tokenizer = Tokenizer.from_file(path)
    ids = (tokenizer.token_to_id(name) for name in _ENDS_OF_TEXT)
    return tokenizer, next((i for i in ids if i is not None), None)


def _hub_tokenizer(name: str) -> tuple[Tokenizer, int | None]:
    from transformers import AutoTokenizer

    try:
        wrapped = AutoTokenizer.from_pretrained(name, use_fast=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"tokenizer '{name}' cannot be read from the hub",
            [f"{type(error).__name__}: {error}"],
            "check the id and the network, or give the path of a tokenizer.json",
        ) from error
    return wrapped.backend_tokenizer, wrapped.eos_token_id


# --- writing ---------------------------------------------------------------------------------------------------------

_BATCH_BYTES = 4_000_000  # text given to the tokenizer at once: enough to keep all cores busy


def _write_splits(
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    record: TokenizerRecord,
    corpus_dir: Path,
    shard_tokens: int,
    progress: Callable[[str], None],
) -> tuple[Split, ...]:
    # a document that spells out a special token, as many about tokenizers do, holds its letters and not that token
    tokenizer.encode_special_tokens = True
    writers: dict[tuple[str, SplitName], _SplitWriter] = {}
    with ExitStack() as open_files:
        for batch in _batches(documents):
            encodings = tokenizer.encode_batch_fast([d.text for d in batch], add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                key = (document.domain, document.split)
                if key not in writers:
                    progress(f"tokenising {document.domain}, {document.split} split")
                    writers[key] = _SplitWriter(corpus_dir, document, record, shard_tokens)
                    open_files.callback(writers[key].abandon)
                writers[key].add(document, encoding.ids)
        domains = list(dict.fromkeys(domain for domain, _ in writers))
        in_order = sorted(writers, key=lambda key: (domains.index(key[0]), key[1] == "heldout"))
        return tuple(writers[key].close() for key in in_order)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    batch_bytes = 0
    for document in documents:
        batch.append(document)
        batch_bytes += len(document.text)
        if batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


@dataclass(slots=True)
class _Tally:
    """Documents and UTF-8 bytes by name."""

    documents: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, text_bytes: int) -> None:
        self.documents[name] += 1
        self.bytes[name] += text_bytes

    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(name=n, documents=self.documents[n], bytes=self.bytes[n]) for n in sorted(self.documents))


class _SplitWriter:
    """Takes the documents of one split, writes its shards as they fill up, and at the end its index and record."""

    def __init__(self, corpus_dir: Path, first: Document, tokenizer: TokenizerRecord, shard_tokens: int) -> None:
        self._domain, self._split, self._role = first.domain, first.split, first.role
        self._end_of_text = tokenizer.end_of_text
        self._corpus_dir = corpus_dir
        # any name is a domain, not every name is a file name
        self._stem = f"{quote(first.domain, safe=' ')}-{first.split}"
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size < 2**16 else np.uint32)
        self._shards = _ShardWriter(corpus_dir, self._stem, dtype, shard_tokens)
        self._token_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self._documents: list[tuple[int, int, int, int]] = []
        self._tokens = 0
        self._sources, self._licences = _Tally(), _Tally()

    def add(self, document: Document, ids: list[int]) -> None:
        tokens = np.array([*ids, self._end_of_text], np.int64)
        self._shards.append(tokens)
        self._token_counts += np.bincount(tokens, minlength=len(self._token_counts))
        self._tokens += len(tokens)
        text = document.text
        text_bytes = len(text.encode())
        self._documents.append((self._tokens, text_bytes, len(text), len(text.split())))
        self._sources.add(document.source.partition(": ")[0], text_bytes)
        self._licences.add(document.licence, text_bytes)

    def close(self) -> Split:
        index = np.array(self._documents, np.int64)
        text_bytes, characters, words = index[:, 1:].sum(axis=0).tolist()
        return Split(
            domain=self._domain,
            split=self._split,
            role=self._role,
            files=self._shards.close(),
            index=self._write_index(index) if self._split == "heldout" else None,
            tokens=self._tokens,
            documents=len(index),
            bytes=text_bytes,
            characters=characters,
            words=words,
            unigram_entropy=_entropy(self._token_counts),
            sources=self._sources.shares(),
            licences=self._licences.shares(),
        )

    def abandon(self) -> None:
        """Close what an error left open; nothing after close()."""
        self._shards.abandon()

    def _write_index(self, index: NDArray[np.int64]) -> TokenFile:
        path = self._corpus_dir / f"{self._stem}-index.npy"
        buffer = io.BytesIO()
        np.save(buffer, index, allow_pickle=False)
        _publish(path, buffer.getvalue())
        return _file_record(path, len(index), index.dtype)


def _entropy(counts: NDArray[np.int64]) -> float:
    """Nats, of the distribution that counts are proportional to."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


class _ShardWriter:
    """Writes a stream of tokens as .npy files of shard_tokens each; a document may begin in one and end in the next."""

    def __init__(self, corpus_dir: Path, stem: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._corpus_dir, self._stem, self._dtype, self._shard_tokens = corpus_dir, stem, dtype, shard_tokens
        self._file: io.BufferedWriter | None = None
        self._tokens_in_file = 0
        self._done: list[TokenFile] = []

    def append(self, tokens: NDArray[np.int64]) -> None:
        while len(tokens):
            if self._file is None:
                self._file = self._partial().open("wb")
                self._file.write(self._header(0))
            taken = tokens[: self._shard_tokens - self._tokens_in_file]
            self._file.write(taken.astype(self._dtype).tobytes())
            self._tokens_in_file += len(taken)
            tokens = tokens[len(taken) :]
            if self._tokens_in_file == self._shard_tokens:
                self._finish()

    def close(self) -> tuple[TokenFile, ...]:
        self._finish()
        return tuple(self._done)

    def abandon(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # the full disk that brought us here; closed all the same
                self._file.close()

    def _finish(self) -> None:
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(self._header(self._tokens_in_file))
        _sync(self._file)
        self._file.close()
        path = self._path()
        self._partial().rename(path)
        self._done.append(_file_record(path, self._tokens_in_file, self._dtype))
        self._file, self._tokens_in_file = None, 0

    def _path(self) -> Path:
        return self._corpus_dir / f"{self._stem}-{len(self._done):05d}.npy"

    def _partial(self) -> Path:
        return self._path().with_suffix(".npy.partial")

    def _header(self, tokens: int) -> bytes:
        """numpy's own header; it pads the length, so the one written first has the size of the final one."""
        header = io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue()


def _file_record(path: Path, rows: int, dtype: np.dtype[Any]) -> TokenFile:
    return TokenFile(path=path.name, sha256=_sha256(path), rows=rows, dtype=dtype.name, bytes=path.stat().st_size)


def _publish(path: Path, content: bytes) -> None:
    """The whole file or none: written beside its place, synced, renamed, the folder synced."""
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        _sync(file)
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sync(file: io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
