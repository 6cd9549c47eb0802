"""Any causal language model of transformers as a checkpoint folder, and the reverse.

folder or hub id -> [hub] -> checkpoint folder -> evaluate
checkpoint folder -> [hub] -> folder that from_pretrained loads
in    weights and a configuration of transformers; code that comes with a model is never executed
out   every parameter as it is, W found through get_output_embeddings, the tokenizer beside it
not   a guess: a model whose weights are not all there, whose head is more than a matrix, or that reads ahead is refused

Letters: V rows of the unembedding, D hidden size, T tokens.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from trainers.checkpoint import TOKENIZER, load_model, read_manifest, read_weights
from trainers.config import Imported
from trainers.errors import InputError
from trainers.model import body
from trainers.scales import ParameterCounts
from trainers.tokens import load_tokenizer, tokenizer_identity
from trainers.tokens import read_manifest as read_corpus

_PROBE_TOKENS = 16  # of the check that the head is a matrix and that no token sees a later one
_NOTHING = "nothing was imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A model as it was read: what trainers.checkpoint.write_imported needs of it.

    weights      every parameter under its name, in its own type;  unembedding   which of them is W
    tokenizer    the text of tokenizer.json; None if it came without one
    """

    imported: Imported
    weights: Mapping[str, Tensor]
    unembedding: str
    tied: bool
    parameters: ParameterCounts
    tokenizer: str | None


def read_foreign(source: str, revision: str | None = None) -> Foreign:
    """Read a model from a folder that save_pretrained wrote, or from the hub.

    source     folder or hub id;  revision   branch, tag or commit of the hub
    raises     InputError if it cannot be read, is no causal language model, lacks weights, or has a head that is not
               one matrix; each names what is missing
    """
    network = _load(source, revision)
    head = network.get_output_embeddings()
    if head is None:
        raise InputError(f"{source}: a {type(network).__name__} has no output embedding, {_NOTHING}")
    weights = dict(network.named_parameters())
    _refuse_buffers(source, network)
    _check_forward(source, network)
    inputs = network.get_input_embeddings().weight
    unembedding = next(name for name, parameter in weights.items() if parameter is head.weight)
    tied = head.weight is inputs
    tokenizer = _read_tokenizer(source, revision)
    imported = Imported(
        source=source,
        revision=revision,
        config=_config_json(network, tied),
        family=network.config.model_type,
        context=_context(source, network),
        vocab_size=_vocab_size(source, tokenizer, rows=len(head.weight)),
        vocab_rows=len(head.weight),
        tokenizer=None if tokenizer is None else tokenizer_identity(tokenizer),
    )
    return Foreign(
        imported=imported,
        weights=weights,
        unembedding=unembedding,
        tied=tied,
        parameters=_count(weights, inputs.numel(), head.weight.numel(), tied),
        tokenizer=tokenizer,
    )


def export_model(checkpoint_dir: Path, target: Path, corpora: Path) -> None:
    """Write a checkpoint's model and tokenizer as a folder that from_pretrained loads; it appears whole or not at all.

    corpora   folder of the prepared corpora: the tokenizer of a trained model is that of its corpus
    raises    InputError if target exists or the folder is no checkpoint
    """
    refuse_existing(target)
    network = load_model(checkpoint_dir)
    weights = read_weights(checkpoint_dir)
    for name, parameter in network.named_parameters():
        parameter.data = weights[name]  # in the type that it came in
    network.config.dtype = network.dtype
    save_model(network, tokenizer_of(checkpoint_dir, corpora), target)


def save_model(network: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, target: Path) -> None:
    """Write a folder that from_pretrained loads. raises InputError if target exists"""
    refuse_existing(target)
    with folder_beside(target.absolute()) as folder, _quiet():
        network.save_pretrained(folder / "model")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / "model")
        (folder / "model").rename(target)


def refuse_existing(target: Path) -> None:
    if target.exists():
        raise InputError(f"{target}: already exists, nothing was written")


@contextmanager
def folder_beside(target: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `target`, gone at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def corpus_tokenizer(corpus_dir: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a prepared corpus, for transformers."""
    tokenizer = load_tokenizer(corpus_dir)
    end_of_text = tokenizer.id_to_token(read_corpus(corpus_dir).tokenizer.end_of_text)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_text, pad_token=end_of_text)


def tokenizer_of(checkpoint_dir: Path, corpora: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer that a checkpoint's model reads: that of its corpus, or the one that was imported with it."""
    manifest = read_manifest(checkpoint_dir)
    if manifest.recipe is not None:
        return corpus_tokenizer(corpora / manifest.recipe.data.corpus)
    if TOKENIZER not in manifest.files:
        return None
    return PreTrainedTokenizerFast(tokenizer_file=str(checkpoint_dir / TOKENIZER))


# ---- reading ---------------------------------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers shows progress bars and whole configurations."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _load(source: str, revision: str | None) -> PreTrainedModel:
    """The model in the type of its files, on the CPU, in evaluation mode, every parameter from the files."""
    more = {"revision": revision} if revision else {}
    try:
        with _quiet():
            network, info = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto", output_loading_info=True, trust_remote_code=False, **more
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{source}: cannot be read as a causal language model, {_NOTHING}",
            [f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"],
            "give a folder that save_pretrained wrote, or an id on the hub and a network",
        ) from error
    problems = [f"{name}: not in the files, it would be newly initialised" for name in sorted(info["missing_keys"])]
    problems += [f"{key[0]}: of another shape in the files" for key in sorted(info["mismatched_keys"])]
    if problems:
        raise InputError(f"{source}: not all weights are there, {_NOTHING}", problems[:10])
    loaded: PreTrainedModel = network.eval()
    return loaded


def _refuse_buffers(source: str, network: PreTrainedModel) -> None:
    saved = network.state_dict()
    if kept := [name for name, _ in network.named_buffers() if name in saved]:
        raise InputError(f"{source}: has saved tensors that are no parameters, {_NOTHING}", kept[:5])


@torch.inference_mode()
def _check_forward(source: str, network: PreTrainedModel) -> None:
    """The logits are W times the last hidden states, and those of a token do not depend on later ones."""
    if network.dtype != torch.float32:
        network = _float32_copy(network)
    head = network.get_output_embeddings().weight
    ids_1T = torch.randint(0, len(head), (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    logits_1TV = network(input_ids=ids_1T).logits
    by_hand_1TV = body(network)(input_ids=ids_1T).last_hidden_state @ head.T
    scale = float(logits_1TV.abs().max())
    if float((logits_1TV - by_hand_1TV).abs().max()) > 1e-4 * scale:
        raise InputError(
            f"{source}: its logits are more than W times its last hidden states (a bias, a scale or a cap), {_NOTHING}"
        )
    changed_1T = ids_1T.clone()
    changed_1T[0, -1] = (changed_1T[0, -1] + 1) % len(head)
    before_1TV = network(input_ids=changed_1T).logits[:, :-1]
    if float((logits_1TV[:, :-1] - before_1TV).abs().max()) > 1e-4 * scale:
        raise InputError(f"{source}: a {type(network).__name__} reads ahead: no causal language model, {_NOTHING}")


def _float32_copy(network: PreTrainedModel) -> PreTrainedModel:
    copy: PreTrainedModel = AutoModelForCausalLM.from_config(network.config, dtype=torch.float32).eval()
    copy.load_state_dict(network.state_dict())
    return copy


def _config_json(network: PreTrainedModel, tied: bool) -> str:
    """The configuration; files may hold a head of its own although it says tied, so it says what is."""
    config: dict[str, Any] = {**network.config.to_dict(), "tie_word_embeddings": tied}
    config.pop("_name_or_path", None)
    return json.dumps(config, sort_keys=True)


def _context(source: str, network: PreTrainedModel) -> int:
    context = getattr(network.config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 2:
        raise InputError(f"{source}: its configuration has no max_position_embeddings, {_NOTHING}")
    return context


def _read_tokenizer(source: str, revision: str | None) -> str | None:
    """The text of tokenizer.json as `data prepare` would write it: whole documents, nothing padded."""
    path = Path(source) / TOKENIZER
    if path.is_file():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        more = {"revision": revision} if revision else {}
        try:
            with _quiet():
                wrapped = AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False, **more)
                tokenizer = wrapped.backend_tokenizer
        except (OSError, ValueError, KeyError, ImportError, AttributeError):
            return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text: str = tokenizer.to_str()
    return text


def _vocab_size(source: str, tokenizer: str | None, rows: int) -> int:
    """Entries of the tokenizer; without one, all rows count as tokens."""
    if tokenizer is None:
        return rows
    entries = 1 + max(Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).values())
    if entries > rows:
        raise InputError(
            f"{source}: its tokenizer does not match, {_NOTHING}",
            [f"the tokenizer has {entries:,} entries, the unembedding {rows:,} rows"],
        )
    return entries


def _count(weights: Mapping[str, Tensor], inputs: int, outputs: int, tied: bool) -> ParameterCounts:
    everything = sum(weight.numel() for weight in weights.values())
    if tied:
        return ParameterCounts(all=everything, no_input_embedding=everything, body=everything - inputs)
    return ParameterCounts(all=everything, no_input_embedding=everything - inputs, body=everything - inputs - outputs)
