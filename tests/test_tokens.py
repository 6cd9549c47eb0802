"""Token files: what is written is what was read, and damage is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import entropy
from small_corpus import SMALL
from test_corpus import write_jsonl

from trainers.corpus import SOURCE_TEXT, read_documents
from trainers.errors import EnvironmentFault, InputError
from trainers.tokens import (
    Settings,
    TrainedTokenizer,
    load_tokenizer,
    open_split,
    prepare,
    read_manifest,
    verify,
)

ROWS = [
    {"text": f"Row {i}: {i**3} naïve words, 世界 and {unicodedata.name(chr(0x1F600 + i % 60))}."} for i in range(200)
]
TRAINED = TrainedTokenizer(vocab_size=320, sample_bytes=1_000_000)
SETTINGS = Settings(text=SOURCE_TEXT, tokenizer=TRAINED, shard_tokens=1500)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_jsonl(tmp_path_factory.mktemp("source") / "rows.jsonl", ROWS))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, source):
    corpus_dir = tmp_path_factory.mktemp("tokens") / "rows"
    prepare(source, corpus_dir, settings=SETTINGS)
    return corpus_dir


@pytest.fixture
def corpus_dir(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "rows")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def test_prepare_when_builtin_is_prepared_twice_then_the_same_digest_and_files(corpus, tmp_path):
    first = read_manifest(corpus)
    second = prepare("builtin", tmp_path / "two", settings=SMALL)
    assert first.digest == second.digest
    assert contents(corpus) == contents(tmp_path / "two")
    assert first.domains == ("docs", "python", "maths", "cpp", "language", "licences")
    assert first.mix == ("docs",)
    assert {(s.domain, s.split) for s in first.splits} == {(d, n) for d in first.domains for n in ("train", "heldout")}


def test_prepare_when_split_then_no_document_is_in_train_and_held_out(prepared):
    tokenizer, manifest = load_tokenizer(prepared), read_manifest(prepared)
    texts = {}
    for name in ("train", "heldout"):
        split = open_split(prepared, "rows", name)
        tokens = split.read(0, split.tokens)
        ends = np.flatnonzero(tokens == manifest.tokenizer.end_of_text)
        pieces = np.split(tokens, ends + 1)[:-1]
        texts[name] = {tokenizer.decode(piece[:-1].tolist()) for piece in pieces}
    assert not texts["train"] & texts["heldout"]
    assert texts["train"] | texts["heldout"] == {row["text"] for row in ROWS}


def test_prepare_when_documents_are_held_out_then_the_index_gives_each_ones_tokens_and_counts(prepared, source):
    heldout = [d.text for d in read_documents(source, SETTINGS.text) if d.split == "heldout"]
    split, tokenizer = open_split(prepared, "rows", "heldout"), load_tokenizer(prepared)
    index = split.documents()
    assert index.shape == (len(heldout), 4)
    start = 0
    for (end, text_bytes, characters, words), text in zip(index.tolist(), heldout, strict=True):
        assert tokenizer.decode(split.read(start, end - 1).tolist()) == text
        assert (text_bytes, characters, words) == (len(text.encode()), len(text), len(text.split()))
        start = end
    assert start == split.tokens


def test_manifest_when_read_then_its_counts_are_those_of_the_files(prepared):
    manifest = read_manifest(prepared)
    by_split = {"train": [], "heldout": []}
    for document in read_documents(manifest.source, SETTINGS.text):
        by_split[document.split].append(document.text)
    for split in manifest.splits:
        tokens = np.concatenate([np.load(prepared / file.path) for file in split.files])
        assert tokens.dtype == np.uint16
        assert split.tokens == len(tokens) == sum(file.rows for file in split.files)
        assert max(file.rows for file in split.files) <= SETTINGS.shard_tokens
        assert split.unigram_entropy == pytest.approx(entropy(np.bincount(tokens)), rel=1e-12)
        assert split.bytes == sum(len(text.encode()) for text in by_split[split.split])
        assert split.documents == len(by_split[split.split]) == sum(share.documents for share in split.sources)
    assert len(manifest.split("rows", "train").files) > 2


def test_read_when_a_range_crosses_shards_then_equal_to_the_concatenated_files(prepared):
    record = read_manifest(prepared).split("rows", "train")
    tokens = np.concatenate([np.load(prepared / file.path) for file in record.files]).astype(np.int64)
    split = open_split(prepared, "rows", "train")
    for start, stop in [(0, 0), (0, 10), (1490, 1510), (1500, 3000), (700, 3700), (0, len(tokens)), (len(tokens),) * 2]:
        np.testing.assert_array_equal(split.read(start, stop), tokens[start:stop])
        assert split.read(start, stop).dtype == np.int64
    with pytest.raises(IndexError):
        split.read(len(tokens), len(tokens) + 1)


def test_prepare_when_a_document_spells_the_end_of_text_then_it_stays_text(tmp_path):
    rows = [{"text": f"{i} the token <|endoftext|> ends a text"} for i in range(60)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = SETTINGS.model_copy(update={"tokenizer": TRAINED.model_copy(update={"vocab_size": 260})})
    manifest = prepare(str(path), tmp_path / "rows", settings=settings)
    split = open_split(tmp_path / "rows", "rows", "train")
    assert (split.read(0, split.tokens) == 0).sum() == manifest.split("rows", "train").documents


def test_prepare_when_the_corpus_is_there_then_nothing_is_written(corpus_dir, source):
    before = {path: path.stat().st_mtime_ns for path in corpus_dir.iterdir()}
    assert prepare(source, corpus_dir, settings=SETTINGS) == read_manifest(corpus_dir)
    assert {path: path.stat().st_mtime_ns for path in corpus_dir.iterdir()} == before


def test_prepare_when_the_corpus_is_there_with_other_settings_then_refused_unless_again(corpus_dir, source):
    other = SETTINGS.model_copy(update={"shard_tokens": 2000})
    with pytest.raises(InputError, match="shard_tokens: 1500 there, 2000 asked for"):
        prepare(source, corpus_dir, settings=other)
    assert prepare(source, corpus_dir, settings=other, again=True).settings == other
    verify(corpus_dir)


def test_prepare_when_an_earlier_one_was_killed_then_it_is_written_again_and_other_files_stay(corpus_dir, source):
    whole = read_manifest(corpus_dir)
    (corpus_dir / "manifest.json").unlink()
    (corpus_dir / "rows-train-00000.npy").write_bytes(b"half")
    (corpus_dir / "rows-train-00099.npy.partial").write_bytes(b"half")
    (corpus_dir / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="no corpus 'rows' at"):
        open_split(corpus_dir, "rows", "train")
    assert prepare(source, corpus_dir, settings=SETTINGS).digest == whole.digest
    assert verify(corpus_dir).digest == whole.digest
    assert (corpus_dir / "notes.txt").read_text() == "mine"
    assert not list(corpus_dir.glob("*.partial"))


def test_prepare_when_two_processes_start_it_then_both_get_the_whole_corpus(prepared, source, tmp_path):
    code = (
        "import sys; from pathlib import Path; from trainers.tokens import *\n"
        "settings = Settings.model_validate_json(sys.argv[3])\n"
        "print(prepare(sys.argv[1], Path(sys.argv[2]), settings=settings).digest)"
    )
    arguments = [sys.executable, "-c", code, source, str(tmp_path / "both"), SETTINGS.model_dump_json()]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {process.communicate()[0].strip() for process in both}
    assert digests == {read_manifest(prepared).digest}
    verify(tmp_path / "both")


def test_prepare_when_a_split_stays_empty_then_input_error_names_it(tmp_path):
    path = write_jsonl(tmp_path / "one.jsonl", [{"text": "only one document " * 30}])
    settings = SETTINGS.model_copy(update={"tokenizer": TrainedTokenizer(vocab_size=260, sample_bytes=1000)})
    with pytest.raises(InputError, match="domain 'one': no document fell into its heldout split"):
        prepare(str(path), tmp_path / "one", settings=settings)
    with pytest.raises(InputError, match="no corpus"):
        read_manifest(tmp_path / "one")


def test_prepare_when_the_text_is_too_little_for_the_vocabulary_then_input_error_says_how_many_it_yields(
    source, tmp_path
):
    settings = SETTINGS.model_copy(update={"tokenizer": TRAINED.model_copy(update={"vocab_size": 50_000})})
    with pytest.raises(InputError, match="vocab_size: 50,000 asked for, the training split of the mix yields"):
        prepare(source, tmp_path / "x", settings=settings)


def save_words(path: Path, words: list[str]) -> str:
    """A tokenizer.json made with the tokenizers library alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return str(path)


def test_prepare_when_a_tokenizer_of_65536_or_more_is_given_then_uint32_and_whole_documents(source, tmp_path):
    words = ["?", "Row", *(f"{i}:" for i in range(70_000)), "</s>"]
    settings = SETTINGS.model_copy(update={"tokenizer": save_words(tmp_path / "words.json", words)})
    manifest = prepare(source, tmp_path / "rows", settings=settings)
    assert manifest.tokenizer.vocab_size == len(words)
    assert manifest.tokenizer.end_of_text == len(words) - 1
    record = manifest.split("rows", "heldout")
    assert record.files[0].dtype == "uint32"
    assert record.tokens == record.words + record.documents


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such tokenizer"), ("{}", "not a tokenizer"), ("text", "not a tokenizer")],
)
def test_prepare_when_the_tokenizer_file_is_missing_or_none_then_input_error_names_it(
    source, tmp_path, content, message
):
    path = tmp_path / "given.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"given\.json: {message}"):
        prepare(source, tmp_path / "x", settings=SETTINGS.model_copy(update={"tokenizer": str(path)}))


def test_prepare_when_the_tokenizer_has_no_end_of_text_then_input_error_lists_the_known_names(source, tmp_path):
    path = save_words(tmp_path / "words.json", ["?", "Row"])
    with pytest.raises(InputError, match=r"no end-of-text token\n  known: <\|endoftext\|>"):
        prepare(source, tmp_path / "x", settings=SETTINGS.model_copy(update={"tokenizer": path}))


def test_verify_when_one_byte_of_a_shard_changed_then_the_fault_names_shard_sums_and_next_step(corpus_dir):
    assert verify(corpus_dir).name == "rows"
    path = corpus_dir / "rows-train-00001.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EnvironmentFault) as caught:
        verify(corpus_dir)
    expected = read_manifest(corpus_dir).split("rows", "train").files[1].sha256
    assert caught.value.kind == "corrupt_file"
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)
    assert "geosweep data prepare" in caught.value.next_step
    assert "--again" in caught.value.next_step


@pytest.mark.parametrize("name", ["tokenizer.json", "rows-heldout-index.npy"])
def test_verify_when_the_tokenizer_or_an_index_changed_then_the_fault_names_it(corpus_dir, name):
    path = corpus_dir / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(EnvironmentFault, match=name):
        verify(corpus_dir)
    path.unlink()
    with pytest.raises(EnvironmentFault, match=f"{name}: the file is missing"):
        verify(corpus_dir)


def test_open_split_when_a_shard_is_cut_or_missing_then_the_fault_names_it(corpus_dir):
    path = corpus_dir / "rows-train-00000.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(EnvironmentFault, match=r"rows-train-00000\.npy: 3,118 bytes, the manifest says 3,128"):
        open_split(corpus_dir, "rows", "train")
    path.unlink()
    with pytest.raises(EnvironmentFault, match=r"rows-train-00000\.npy: the file is missing"):
        open_split(corpus_dir, "rows", "train")
    open_split(corpus_dir, "rows", "heldout")


def test_open_split_when_the_domain_is_unknown_then_input_error_lists_the_domains(prepared):
    with pytest.raises(InputError, match=r"no train split of domain 'code'\n  domains: rows"):
        open_split(prepared, "code", "train")


def test_read_manifest_when_there_is_no_corpus_then_input_error_gives_the_command(tmp_path):
    with pytest.raises(InputError, match="make it: geosweep data prepare builtin"):
        read_manifest(tmp_path / "builtin")


def test_read_manifest_when_the_format_is_newer_then_refused_whatever_else_it_holds(corpus_dir):
    path = corpus_dir / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2, "unknown": 1}))
    with pytest.raises(InputError, match="its format 2 is newer than 1"):
        read_manifest(corpus_dir)


@pytest.mark.parametrize("damage", ["", "[]", '{"format_version": 1}'])
def test_read_manifest_when_it_is_damaged_then_the_fault_names_the_file(corpus_dir, damage):
    (corpus_dir / "manifest.json").write_text(damage)
    with pytest.raises(EnvironmentFault, match=r"manifest\.json: not a manifest") as caught:
        read_manifest(corpus_dir)
    assert caught.value.kind == "corrupt_file"


FULL_DISK = """
import sys
from pathlib import Path
from trainers.tokens import *

try:
    prepare(sys.argv[1], Path(sys.argv[2]), settings=Settings.model_validate_json(sys.argv[3]))
except EnvironmentFault as fault:
    print(fault.kind, fault)
print((Path(sys.argv[2]) / "manifest.json").exists())
"""


def test_prepare_when_the_disk_is_full_then_the_fault_says_so_and_there_is_no_corpus(tmp_path):
    rows = [{"text": " ".join(str(n * n) for n in range(i, i + 300))} for i in range(200)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    disk = tmp_path / "disk"
    disk.mkdir()
    in_own_mounts = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount_and_do = ['mount -t tmpfs -o size=64k none "$0" && exec "$@"', str(disk)]
    prepare_there = [sys.executable, "-W", "error", "-c", FULL_DISK, str(path), str(disk / "rows")]
    done = subprocess.run(
        [*in_own_mounts, *mount_and_do, *prepare_there, SETTINGS.model_dump_json()],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("only a user who may mount can fill a small disk")
    assert done.stderr == ""
    assert f"storage_error {disk}/rows: No space left on device" in done.stdout
    assert done.stdout.endswith("False\n")


def test_tokens_when_imported_then_neither_torch_nor_transformers_nor_datasets_is_loaded():
    code = "import sys, trainers.tokens; print({'torch', 'transformers', 'datasets', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
