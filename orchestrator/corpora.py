"""What a plan and a session need to know of the corpora in a store.

store -> [corpora] -> plan, run
in    the manifests of the prepared corpora
out   CorpusFacts by name; a complete check of the token files before a session trains on them; new corpora
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from orchestrator.plan import Evaluation, Plan
from orchestrator.presets import CorpusFacts
from orchestrator.store.copies import corpus_folders, fetch_corpus, put_corpus
from orchestrator.store.files import files_of
from orchestrator.store.layout import create_or_open
from trainers.corpus import SUITES, SourceText, SuiteText
from trainers.errors import InputError
from trainers.tokens import (
    Manifest,
    Settings,
    TrainedTokenizer,
    default_settings,
    prepare,
    read_manifest,
    verify,
)

VERIFY_LIMIT_BYTES = 8 * 10**9  # above this, hashing before each session takes minutes: `geosweep data verify` does it


def corpus_facts(root: Path) -> dict[str, CorpusFacts]:
    """Facts of every corpus that is prepared in the store at `root`; none where there is no store yet."""
    return {folder.name: _facts(folder) for folder in corpus_folders(root)}


def _facts(folder: Path) -> CorpusFacts:
    manifest = read_manifest(folder)
    mix = (split for split in manifest.splits if split.role == "mix" and split.split == "train")
    return CorpusFacts(
        name=folder.name,
        digest=manifest.digest,
        vocab_size=manifest.tokenizer.vocab_size,
        tokens=sum(split.tokens for split in mix),
        heldout_domains=sum(split.split == "heldout" for split in manifest.splits),
    )


def require_corpora(root: Path, plan: Plan) -> None:
    """Every corpus that the plan trains or is evaluated on is prepared, and its files are what its manifest says.

    raises  InputError that names what is missing; EnvironmentFault (corrupt_file) that names the damaged file
    """
    require(root, plan.sweep, {t.recipe.data.corpus: "training" for t in plan.trials} | read_by(plan.evaluations))


def read_by(evaluations: Iterable[Evaluation]) -> dict[str, str]:
    """The corpora that evaluations read, each with one of the evaluators that does."""
    return {name: f"evaluator '{e.evaluator}'" for e in evaluations for name in e.settings.corpora}


def require(root: Path, sweep: str, names: Mapping[str, str]) -> None:
    """As require_corpora. names: corpus -> what needs it"""
    there = corpus_facts(root)
    if missing := [f"'{name}' for {why}" for name, why in names.items() if name not in there]:
        raise InputError(
            f"{sweep}: {len(missing)} corpora are not prepared in {files_of(root).name(root)}, nothing was started",
            missing,
            f"prepare each: geosweep data prepare NAME --store {files_of(root).name(root)}",
        )
    for name in names:
        folder = fetch_corpus(root, name)
        if sum(file.stat().st_size for file in folder.glob("*.npy")) <= VERIFY_LIMIT_BYTES:
            verify(folder)


def settings_of(
    source: str,
    *,
    tokenizer: str | None,
    vocab_size: int | None,
    text_column: str | None,
    domain_column: str | None,
    copy: Path | None = None,
) -> Settings:
    """The source's default settings with what the caller chose; InputError where a choice does not apply."""
    settings = default_settings(source)
    changes: dict[str, object] = {}
    if tokenizer is not None and vocab_size is not None:
        raise InputError("--vocab-size is for a tokenizer that is trained here; --tokenizer names one that exists")
    if tokenizer is not None:
        changes["tokenizer"] = tokenizer
    if vocab_size is not None:
        assert isinstance(settings.tokenizer, TrainedTokenizer)
        changes["tokenizer"] = settings.tokenizer.model_copy(update={"vocab_size": vocab_size})
    columns = {
        name: value
        for name, value in (("text_column", text_column), ("domain_column", domain_column))
        if value is not None
    }
    if columns:
        if not isinstance(settings.text, SourceText):
            raise InputError("--text-column and --domain-column are for sources with columns; 'builtin' has none")
        changes["text"] = settings.text.model_copy(update=columns)
    if copy is not None:
        if not isinstance(settings.text, SuiteText):
            raise InputError(f"--from is for a published suite: {', '.join(SUITES)}; '{source}' is none")
        changes["text"] = settings.text.model_copy(update={"repository": str(copy)})
    return Settings.model_validate({**dict(settings), **changes})


def prepare_corpus(
    source: str, root: Path, name: str | None, settings: Settings, *, again: bool, say: Callable[[str], None]
) -> Manifest:
    """Make a corpus in the store at `root`; name None: "builtin", or the last part of the source without its ending."""
    layout = create_or_open(root)
    folder = layout.corpus(name or Path(source).stem)
    fetch_corpus(root, folder.name)
    manifest = prepare(source, folder, settings=settings, again=again, progress=say)
    put_corpus(root, folder.name)
    return manifest
