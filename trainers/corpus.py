"""Text sources to documents, each in one domain and one split.

source -> [corpus] -> tokens -> batches -> model
in    "builtin", the text of this Python installation; "hf:OWNER/NAME"; or a local Parquet, JSONL, text file or folder
out   Documents in a fixed order: the same machine and environment give the same text in the same order
not   tokens, files of ours, randomness: the split of a document follows from its text alone
"""

from __future__ import annotations

import ast
import email
import hashlib
import importlib.metadata
import inspect
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainers.config import Frozen, PositiveInt
from trainers.errors import InputError, nearest

SplitName = Literal["train", "heldout"]
Role = Literal["mix", "ood"]
Percent = Annotated[int, Field(gt=0, lt=100, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text, whole.

    role      mix: part of the pre-training mix; ood: out of domain, for evaluation and fine-tuning
    source    where it comes from, "collection: place": "numpy 2.4.6: numpy/linalg/_linalg.py"
    licence   as the collection states it
    """

    text: str
    domain: str
    role: Role
    split: SplitName
    source: str
    licence: str


class BuiltinDomain(Frozen):
    """How much of a built-in domain is taken. max_bytes counts the UTF-8 text of whole documents."""

    name: Literal["docs", "python", "maths", "cpp", "language", "licences"]
    role: Role
    max_bytes: PositiveInt
    heldout_percent: Percent


class BuiltinText(Frozen):
    """The built-in corpus.

    min_characters, max_characters   documents outside are left out: one-liners below, data tables above
    """

    domains: tuple[BuiltinDomain, ...]
    min_characters: PositiveInt
    max_characters: PositiveInt


class SourceText(Frozen):
    """Any other source.

    text_column     column that holds the text ("text" for .txt and .md files, which are one document each)
    domain_column   column that names the domain; None: the whole source is one domain
    hub_split       split of a Hugging Face dataset
    max_bytes       stop after the document that reaches this much UTF-8 text; None: all of it
    """

    text_column: str
    domain_column: str | None
    hub_split: str
    max_bytes: PositiveInt | None
    heldout_percent: Percent


class SuiteText(Frozen):
    """A published collection of evaluation sets: read whole, all of it held out, never trained on.

    repository     id on the Hugging Face hub, or a folder with a copy of it
    parts          its configurations, each a source of its own; empty: the one that it has
    hub_split      split of every part
    text_column    column that holds the text
    domain_path    where a row says its domain: a column, or a column and a field inside; none there: the part's name
    contamination  who may have trained on this text; kept beside every number
    """

    repository: str
    parts: tuple[str, ...]
    hub_split: str
    text_column: str
    domain_path: tuple[str, ...]
    contamination: str


# Evaluation sets are small, so a third or a half of each is held out; of the mix, 5 % are 270,000 tokens.
BUILTIN_TEXT = BuiltinText(
    domains=(
        BuiltinDomain(name="docs", role="mix", max_bytes=16_000_000, heldout_percent=5),
        BuiltinDomain(name="python", role="ood", max_bytes=3_000_000, heldout_percent=33),
        BuiltinDomain(name="maths", role="ood", max_bytes=3_000_000, heldout_percent=33),
        BuiltinDomain(name="cpp", role="ood", max_bytes=1_500_000, heldout_percent=33),
        BuiltinDomain(name="language", role="ood", max_bytes=1_500_000, heldout_percent=50),
        BuiltinDomain(name="licences", role="ood", max_bytes=1_500_000, heldout_percent=50),
    ),
    min_characters=200,
    max_characters=200_000,
)
SOURCE_TEXT = SourceText(text_column="text", domain_column=None, hub_split="train", max_bytes=None, heldout_percent=5)


_PALOMA_PARTS = (
    "4chan_meta_sep",
    "c4_100_domains",
    "c4_en",
    "dolma-v1_5",
    "dolma_100_programing_languages",
    "dolma_100_subreddits",
    "falcon-refinedweb",
    "gab",
    "m2d2_s2orc_unsplit",
    "m2d2_wikipedia_unsplit",
    "manosphere_meta_sep",
    "mc4",
    "ptb",
    "redpajama",
    "twitterAAE_HELM_fixed",
    "wikitext_103",
)
_PALOMA = SuiteText(
    repository="allenai/paloma",
    parts=_PALOMA_PARTS,
    hub_split="val",
    text_column="text",
    domain_path=("subdomain",),
    contamination="Paloma removes its text from the training data of its own baselines only; others may hold it",
)
SUITES: Mapping[str, SuiteText] = {
    "pile-10k": SuiteText(
        repository="NeelNanda/pile-10k",
        parts=(),
        hub_split="train",
        text_column="text",
        domain_path=("meta", "pile_set_name"),
        contamination="the first 10,000 documents of the Pile: training text of every model trained on the Pile",
    ),
    "paloma": _PALOMA,
    "dolma-100-code": _PALOMA.model_copy(update={"parts": ("dolma_100_programing_languages",)}),
}
"""Published suites that `geosweep data prepare` knows by name."""


def read_documents(source: str, settings: BuiltinText | SourceText | SuiteText) -> Iterator[Document]:
    """All documents of a source, lazily, in a fixed order, without exact duplicates across all its domains.

    Keeps 32 bytes of memory per document to find duplicates.
    raises   InputError if the source or a column does not exist, holds no text or cannot be reached
    """
    if isinstance(settings, BuiltinText):
        return _builtin_documents(settings)
    if isinstance(settings, SuiteText):
        return _suite_documents(source, settings)
    return _source_documents(source, settings)


def split_of(text_sha256: bytes, heldout_percent: int) -> SplitName:
    """The split of a document follows from its own text; what else the corpus holds cannot move it."""
    hundredth = int.from_bytes(text_sha256[:8], "big") * 100 >> 64
    return "heldout" if hundredth < heldout_percent else "train"


# --- the built-in corpus ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    """One file of the installation. name: path below its site-packages or standard library, with forward slashes."""

    path: Path
    name: str
    package: str
    version: str
    licence: str

    @property
    def source(self) -> str:
        return f"{self.package} {self.version}: {self.name}"


_OWN_DISTRIBUTION = "geosweep"  # its text changes with every commit of ours; digests must not
# packages are read by their own lists; the others are build records: paths and flags of the machine
_NOT_LIBRARY = ("site-packages", "dist-packages", "_sysconfigdata", "config-")
_MATHS = frozenset({"sympy", "scipy"})
_CPP = frozenset({"torch", "numpy", "pyarrow"})
_TEST_FOLDERS = frozenset({"test", "tests", "testing", "_tests", "idle_test"})
_LICENCE_NAME = re.compile(r"(licen[cs]es?|notice|copying)([-_.].*)?", re.I)
_LICENCE_PHRASES = (
    "copyright (c)",
    "copyright ©",
    ":copyright:",
    "licensed under",
    "all rights reserved",
    "spdx-",
    "permission is hereby granted",
    "redistribution and use in source",
)
_PYTHON_COMMENT = re.compile(r"\s*(?:[ \t]*#[^\n]*\n)+")
_CPP_COMMENT = re.compile(r"\s*(?:/\*.*?\*/|(?:[ \t]*//[^\n]*\n)+)", re.S)
_GENERATED = re.compile(r"@generated|do not (edit|modify)|auto-?generated|automatically generated|generated by", re.I)
_GENERATED_WITHIN = 600  # characters: generators sign at the top


def _builtin_documents(settings: BuiltinText) -> Iterator[Document]:
    files = _installed_files()
    seen: set[bytes] = set()
    for rule in settings.domains:
        taken_bytes = 0
        for file, raw_text in _BUILTIN_TEXTS[rule.name](files):
            text = raw_text.strip()
            if not settings.min_characters <= len(text) <= settings.max_characters:
                continue
            if (sha256 := _new(text, seen)) is None:
                continue
            yield Document(
                text=text,
                domain=rule.name,
                role=rule.role,
                split=split_of(sha256, rule.heldout_percent),
                source=file.source,
                licence=file.licence,
            )
            taken_bytes += len(text.encode())
            if taken_bytes >= rule.max_bytes:
                break


def _new(text: str, seen: set[bytes]) -> bytes | None:
    """The sha256 of a text that was not seen before, which now is; None for one that was."""
    sha256 = hashlib.sha256(text.encode()).digest()
    if sha256 in seen:
        return None
    seen.add(sha256)
    return sha256


def _installed_files() -> list[InstalledFile]:
    """Files of the standard library and of all installed distributions but our own.

    Ordered by the hash of their names: where a domain stops at its max_bytes, what was taken is a fair sample of all
    packages and not the head of the alphabet.
    """
    files = [*_library_files(), *_distribution_files()]
    return sorted(files, key=lambda file: hashlib.sha256(f"{file.package}/{file.name}".encode()).digest())


def _library_files() -> Iterator[InstalledFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in [*root.rglob("*.py"), *root.glob("LICENSE.txt")]:
        relative = path.relative_to(root)
        if relative.parts[0].startswith(_NOT_LIBRARY):
            continue
        yield InstalledFile(
            path=path,
            name=relative.as_posix(),
            package="python",
            version=platform.python_version(),
            licence="PSF-2.0",
        )


def _distribution_files() -> Iterator[InstalledFile]:
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for distribution in importlib.metadata.distributions(path=folders):
        metadata = distribution.metadata  # parsed anew at each access
        package, version, licence = metadata["Name"], metadata["Version"], _licence_of(metadata)
        if package == _OWN_DISTRIBUTION:
            continue
        for file in distribution.files or ():
            if file.parts[0] == ".." or file.suffix == ".pyc":
                continue
            path = Path(str(file.locate()))
            yield InstalledFile(path=path, name=file.as_posix(), package=package, version=version, licence=licence)


def _licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """SPDX expression, else the classifier, else a short licence field (old packages put the whole text there)."""
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [c.rsplit(" :: ", 1)[1] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    if classifiers:
        return " and ".join(classifiers)
    short = [text for text in metadata.get_all("License") or () if text and len(text) < 60 and "\n" not in text]
    return short[0] if short else "see its licence file"


def _docs(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    for file in files:
        if file.package in _MATHS or file.package == "python" or _is_licence(file) or _is_test(file):
            continue
        if file.path.suffix == ".py":
            text = _text_of(file)
            if not _is_generated(text):
                yield from ((file, prose) for prose in _prose(text) if not _speaks_of_licence(prose))
        elif file.path.name == "METADATA":
            yield file, str(email.message_from_string(_text_of(file)).get_payload())
        elif file.path.suffix in (".rst", ".md"):
            yield file, _text_of(file)


def _python(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    own = (file for file in files if file.package == "python" and not file.name.startswith("pydoc_data/"))
    return _sources(own, frozenset({".py"}))


def _maths(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    return _sources((file for file in files if file.package in _MATHS), frozenset({".py"}))


def _cpp(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    return _sources((file for file in files if file.package in _CPP), frozenset({".h", ".hpp", ".cuh"}))


def _language(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    """The language reference, one document a topic."""
    for file in files:
        if file.name == "pydoc_data/topics.py":
            module = ast.parse(_text_of(file))
            tables = [node.value for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
            topics: dict[str, str] = ast.literal_eval(tables[0])
            yield from ((file, topics[topic]) for topic in sorted(topics))


def _licences(files: Iterable[InstalledFile]) -> Iterator[tuple[InstalledFile, str]]:
    return ((file, _text_of(file)) for file in files if _is_licence(file))


_BUILTIN_TEXTS: Mapping[str, Callable[[Iterable[InstalledFile]], Iterator[tuple[InstalledFile, str]]]] = {
    "docs": _docs,
    "python": _python,
    "maths": _maths,
    "cpp": _cpp,
    "language": _language,
    "licences": _licences,
}


def _sources(files: Iterable[InstalledFile], suffixes: frozenset[str]) -> Iterator[tuple[InstalledFile, str]]:
    """Whole source files, without tests, generated files and licence headers."""
    for file in files:
        if file.path.suffix in suffixes and not _is_test(file):
            text = _text_of(file)
            if not _is_generated(text):
                yield file, without_licence_header(text, file.path.suffix)


def without_licence_header(source: str, suffix: str) -> str:
    """A source file without those of its leading comment blocks that speak of a licence or copyright."""
    comment = _PYTHON_COMMENT if suffix == ".py" else _CPP_COMMENT
    start, kept = 0, []
    while header := comment.match(source, start):
        start = header.end()
        if not re.search(r"copyright|licen[cs]e", header[0], re.I):
            kept.append(header[0])
    return "".join([*kept, source[start:]])


def _is_test(file: InstalledFile) -> bool:
    parts = Path(file.name).parts
    return not _TEST_FOLDERS.isdisjoint(parts[:-1]) or parts[-1].startswith("test_")


def _is_licence(file: InstalledFile) -> bool:
    return file.path.suffix != ".py" and _LICENCE_NAME.fullmatch(file.path.name) is not None


def _speaks_of_licence(prose: str) -> bool:
    lowered = prose.lower()
    return any(phrase in lowered for phrase in _LICENCE_PHRASES)


def _is_generated(text: str) -> bool:
    return _GENERATED.search(text, 0, _GENERATED_WITHIN) is not None


def _text_of(file: InstalledFile) -> str:
    """The file's text; empty where it is not UTF-8 or no longer there: then there is nothing to take."""
    try:
        return file.path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return ""


# --- prose inside Python source --------------------------------------------------------------------------------------

# Comments and strings of a Python file. Ten times faster than ast, which needs a minute for the 150 MB of an
# installation; the tests compare the docstrings with those that ast finds.
_COMMENT_OR_STRING = re.compile(
    r"""\#[^\n]*
    |\"{3}(?:[^"\\]++|\\.|"(?!""))*+\"{3}
    |'{3}(?:[^'\\]++|\\.|'(?!''))*+'{3}
    |"(?:[^"\\\n]++|\\.)*+"
    |'(?:[^'\\\n]++|\\.)*+'""",
    re.S | re.X,
)
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*+#[^\n]*+\n){5,}+", re.M)
_PROSE_SHARE = 0.85  # letters and spaces in a comment block; commented-out code and tables have fewer


def _prose(source: str) -> Iterator[str]:
    """Docstrings, then long comments."""
    yield from docstrings(source)
    for block in _COMMENT_BLOCK.finditer(source):
        text = re.sub(r"^[ \t]*#+ ?", "", block[0], flags=re.M)
        if sum(c.isalpha() or c.isspace() for c in text) >= _PROSE_SHARE * len(text):
            yield text


def docstrings(source: str) -> Iterator[str]:
    """The triple-quoted docstrings of a Python file in their order, indentation removed.

    A docstring stands on its own line, first in the file or after the colon that opens a block.
    """
    code_before, end = "", 0
    for match in _COMMENT_OR_STRING.finditer(source):
        gap = source[end : match.start()]
        prefix = gap[-1:] if gap[-1:] in ("r", "R") else ""
        code = gap.removesuffix(prefix).rstrip()
        code_before = code[-1:] or code_before
        end = match.end()
        if match[0][0] == "#":
            continue
        if match[0][:3] in ('"""', "'''") and code_before in ("", ":") and _ends_its_line(source, end):
            raw = match[0][3:-3]
            yield inspect.cleandoc(ast.literal_eval(prefix + match[0]) if "\\" in raw else raw)
        code_before = match[0][-1]


def _ends_its_line(source: str, end: int) -> bool:
    line_end = source.find("\n", end)
    rest = source[end : line_end if line_end >= 0 else None].lstrip()
    return not rest or rest.startswith("#")


# --- other sources ---------------------------------------------------------------------------------------------------

_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text"}


def _source_documents(source: str, settings: SourceText) -> Iterator[Document]:
    seen: set[bytes] = set()
    taken_bytes = 0
    name = source.removeprefix("hf:").rstrip("/").rsplit("/", 1)[-1]
    for row in _rows(source, settings):
        text = _text_column(row, source, settings)
        if not text.strip() or (sha256 := _new(text, seen)) is None:
            continue
        yield Document(
            text=text,
            domain=str(row[settings.domain_column]) if settings.domain_column else Path(name).stem,
            role="mix",
            split=split_of(sha256, settings.heldout_percent),
            source=source,
            licence="as its source states",
        )
        taken_bytes += len(text.encode())
        if settings.max_bytes is not None and taken_bytes >= settings.max_bytes:
            return


def _suite_documents(source: str, settings: SuiteText) -> Iterator[Document]:
    """Domains are called part/domain, so that both ways to average over them stay open."""
    seen: set[bytes] = set()
    for part in settings.parts or (source,):
        config = part if settings.parts else None
        for row in _dataset_rows(settings.repository, config, settings.hub_split):
            text = _text_of_row(row, source, settings.text_column)
            if text.strip() and _new(text, seen) is not None:
                yield Document(
                    text=text,
                    domain=f"{part}/{_domain_of_row(row, settings.domain_path) or part}",
                    role="ood",
                    split="heldout",
                    source=f"{settings.repository}: {part}",
                    licence="as its source states",
                )


def _domain_of_row(row: Mapping[str, Any], path: Sequence[str]) -> str | None:
    """What the row says, or None where it says nothing."""
    found: Any = row
    for name in path:
        if not isinstance(found, Mapping) or found.get(name) is None:
            return None
        found = found[name]
    return str(found)


def _text_column(row: Mapping[str, Any], source: str, settings: SourceText) -> str:
    column = settings.domain_column
    if column is not None and column not in row:
        raise InputError(f"{source}: nothing was read", [f"domain_column: no column '{column}'{nearest(column, row)}"])
    return _text_of_row(row, source, settings.text_column)


def _text_of_row(row: Mapping[str, Any], source: str, column: str) -> str:
    if column not in row:
        raise InputError(f"{source}: nothing was read", [f"text_column: no column '{column}'{nearest(column, row)}"])
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        problem = f"text_column: '{column}' holds {type(text).__name__}, text is needed"
        raise InputError(f"{source}: nothing was read", [problem], f"columns: {', '.join(sorted(row))}")
    return text


def _rows(source: str, settings: SourceText) -> Iterator[Mapping[str, Any]]:
    return _hub_rows(source, settings.hub_split) if source.startswith("hf:") else _file_rows(Path(source))


def _file_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    for loader, files in _files_by_loader(path).items():
        # sample_by: a .txt or .md file is one document; datasets' own default is one a line
        options = {"sample_by": "document"} if loader == "text" else {}
        try:
            yield from load_dataset(loader, data_files=files, split="train", streaming=True, **options)
        except (ValueError, DatasetGenerationError) as error:
            raise InputError(
                f"{path}: not readable as {loader}",
                [f"{type(error).__name__}: {error}"],
                "a .jsonl file has one JSON object a line",
            ) from error


def _files_by_loader(path: Path) -> dict[str, list[str]]:
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder",
            next_step="give a file, a folder, 'hf:OWNER/NAME' for a Hugging Face dataset, or 'builtin'",
        )
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in found if file.is_file() and file.suffix in _LOADERS]
    if not files:
        raise InputError(f"{path}: no text to read", [f"file names must end in {', '.join(sorted(_LOADERS))}"])
    return {
        loader: [str(file) for file in files if _LOADERS[file.suffix] == loader]
        for loader in dict.fromkeys(_LOADERS.values())
        if any(_LOADERS[file.suffix] == loader for file in files)
    }


def _hub_rows(source: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of "hf:OWNER/NAME" or, with a configuration, "hf:OWNER/NAME/CONFIG"."""
    parts = source.removeprefix("hf:").split("/")
    return _dataset_rows("/".join(parts[:2]), "/".join(parts[2:]) or None, split)


def _dataset_rows(name: str, config: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set of the hub, or of a folder that holds a copy of one."""
    from datasets import load_dataset

    try:
        yield from load_dataset(name, config, split=split, streaming=True)
    except (OSError, ValueError) as error:  # not found, gated, no such configuration or split, no network
        source = name if Path(name).is_dir() else f"hf:{name}"
        raise InputError(
            f"{source}: dataset '{name}', configuration '{config or 'default'}', split '{split}' cannot be read",
            [f"{type(error).__name__}: {error}"],
            "check the id and the split, log in for a gated dataset (`hf auth login`), or give local files instead",
        ) from error
