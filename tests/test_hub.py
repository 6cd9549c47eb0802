"""Models of transformers into the store and out again, family by family; what is no causal model is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import geosweep, geosweep_process
from recipes import tiny_recipe
from test_backfill import NoScreen
from test_evaluate import LOSS, fresh_weights, recipe_for, save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from evaluators.config import GeometrySettings, LossSettings
from evaluators.evaluate import evaluate
from evaluators.hub import corpus_tokenizer, export_model, read_foreign
from orchestrator.backfill import Request, evaluate_sweep
from orchestrator.imports import ImportEnd, import_models
from orchestrator.query import Store
from orchestrator.store.layout import StoreLayout
from trainers.checkpoint import load_model, read_tensor, verify_checkpoint
from trainers.errors import InputError

ROWS = 512
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.2,
}
NO_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "olmo": (OlmoForCausalLM, OlmoConfig(**SHAPE)),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SHAPE)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SHAPE)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=ROWS, n_embd=32, n_layer=2, n_head=2, n_positions=64, **NO_IDS)),
}
IDS = torch.randint(0, ROWS, (2, 16), generator=torch.Generator().manual_seed(0))


def saved(folder: Path, family: str, tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family in a folder that save_pretrained wrote."""
    kind, config = FAMILIES[family]
    torch.manual_seed(1)
    network = kind(type(config)(**{**config.to_dict(), "tie_word_embeddings": tied})).to(dtype).eval()
    network.save_pretrained(folder)
    return network


@torch.inference_mode()
def logits(network: PreTrainedModel) -> torch.Tensor:
    return network.float().eval()(input_ids=IDS).logits


def folder_of(root: Path, end: ImportEnd, number: int = -1) -> Path:
    manifest = end.manifests[number]
    return StoreLayout(root).checkpoint(manifest.segment, manifest.tokens)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_comes_in_and_goes_out_with_equal_logits(
    tmp_path: Path, store_root: Path, corpus: Path, family: str, tied: bool
) -> None:
    network = saved(tmp_path / "model", family, tied)
    corpus_tokenizer(corpus).save_pretrained(tmp_path / "model")
    end = import_models(store_root, str(tmp_path / "model"), [], name="m")
    folder = folder_of(store_root, end)
    (manifest,) = end.manifests
    assert verify_checkpoint(folder) == manifest
    assert (manifest.tied, manifest.network.vocab_size, manifest.network.vocab_rows) == (tied, 500, ROWS)
    assert manifest.parameters.all == sum(p.numel() for p in network.parameters())
    assert torch.equal(read_tensor(folder, manifest.unembedding), network.get_output_embeddings().weight)
    assert torch.equal(logits(load_model(folder)), logits(network))

    export_model(folder, tmp_path / "out", store_root / "corpora")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(network))
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("import os") == corpus_tokenizer(corpus).encode(
        "import os"
    )


@pytest.mark.parametrize("family", ["olmo", "pythia"])
def test_a_model_trained_here_goes_out_with_equal_logits_and_its_tokenizer(
    tmp_path: Path, corpus: Path, family: str
) -> None:
    recipe = tiny_recipe(family=family).model_copy(update={"data": recipe_for(corpus).data})
    folder = save(tmp_path / "0", recipe, fresh_weights(recipe))
    export_model(folder, tmp_path / "out", corpus.parent)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(load_model(folder)))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 500
    with pytest.raises(InputError, match="already exists"):
        export_model(folder, tmp_path / "out", corpus.parent)


def test_geometry_and_losses_of_an_imported_model_are_those_of_its_weights(
    tmp_path: Path, store_root: Path, corpus: Path
) -> None:
    network = saved(tmp_path / "model", "gpt2", tied=True, dtype=torch.bfloat16)
    corpus_tokenizer(corpus).save_pretrained(tmp_path / "model")
    folder = folder_of(store_root, import_models(store_root, str(tmp_path / "model"), [], name="m"))
    rank = next(v for v in evaluate(folder, GeometrySettings(), corpora=corpus.parent) if v.metric == "effective_rank")
    s = np.linalg.svd(network.get_output_embeddings().weight[:500].detach().double().numpy(), compute_uv=False)
    p = s / s.sum()
    assert rank.value == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-10)
    assert (rank.n, rank.convention["dtype"], rank.convention["tied"]) == (500, "bfloat16", True)
    values = evaluate(folder, LOSS, corpora=corpus.parent)
    assert {v.convention["in_distribution"] for v in values} == {None}
    assert all(v.value is not None and v.value > 1 for v in values)


def test_an_imported_trial_is_queried_like_any_other_and_equal_weights_at_two_steps_are_reported(
    tmp_path: Path, store_root: Path
) -> None:
    saved(tmp_path / "model", "gpt_neox")
    saved_again = tmp_path / "again"
    shutil.copytree(tmp_path / "model", saved_again)
    import_models(store_root, str(tmp_path / "model"), [], name="suite", tokens=1000)
    end = import_models(store_root, str(saved_again), [], name="suite", tokens=2000)
    assert [manifest.tokens for manifest in end.manifests] == [1000, 2000]
    assert end.equal == ((1000, 2000),)
    same = import_models(store_root, str(saved_again), [], name="suite", tokens=2000)
    assert same.manifests == end.manifests
    with Store(store_root) as store:
        cells = store.sql("select trial, state, checkpoints_done, token_budget from cells").rows()
        assert cells == [{"trial": end.trial, "state": "complete", "checkpoints_done": 2, "token_budget": 2000}]
        (trial,) = store.sql("select * from trials join latest using (revision)").rows()
    assert (trial["family"], trial["batch_size"], trial["corpus"]) == ("gpt_neox", None, None)
    with pytest.raises(InputError, match="trained on no corpus that is known"):
        evaluate_sweep(store_root, "suite", Request(evaluators=("loss",)), NoScreen())
    done = geosweep("resume", "suite", "--store", store_root)
    assert done.returncode == 2
    assert "'suite' was imported: there is nothing to train" in done.stderr


def test_a_revision_says_its_tokens_or_is_refused(store_root: Path) -> None:
    from orchestrator.imports import _position

    assert _position("step1000-tokens4B", None) == (4_000_000_000, 1000)
    assert _position("step143000", 2_097_152) == (143_000 * 2_097_152, 143_000)
    for revision, says in (("main", "says neither step nor tokens"), ("step10", "how many tokens is a step")):
        with pytest.raises(InputError, match=says):
            import_models(store_root, "someone/model", [revision])


def test_revisions_of_a_model_on_the_hub_are_checkpoints_of_one_trial_and_equal_ones_are_reported(
    tmp_path: Path, store_root: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub as it lies in a user's cache, which is all that is there without a network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cached = tmp_path / "hub" / "models--someone--suite"
    for number, (revision, scale) in enumerate({"step0": 1.0, "step1": 1.0, "step1000": 2.0}.items()):
        network = saved(tmp_path / revision, "gpt_neox")
        torch.manual_seed(7)
        torch.nn.init.normal_(network.get_output_embeddings().weight, std=scale)
        commit = f"{number:040x}"
        network.save_pretrained(cached / "snapshots" / commit)
        corpus_tokenizer(corpus).save_pretrained(cached / "snapshots" / commit)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / revision).write_text(commit)
    asked = [part for revision in ("step0", "step1", "step1000") for part in ("--revision", revision)]
    done = geosweep_process("import", "someone/suite", *asked, "--tokens-per-step", "2048", "--store", store_root)
    assert done.returncode == 0, done.stderr
    assert "3 checkpoints" in done.stdout
    assert "the same unembedding, bit for bit, at 0, 2,048 tokens" in done.stdout
    with Store(store_root) as store:
        found = store.sql("select tokens, steps, vocab_size from checkpoints order by tokens").rows()
    assert found == [{"tokens": 2048 * step, "steps": step, "vocab_size": 500} for step in (0, 1, 1000)]


# ---- refused ---------------------------------------------------------------------------------------------------------


def without_head(folder: Path) -> None:
    LlamaModel(FAMILIES["llama"][1]).save_pretrained(folder)


def with_biased_head(folder: Path) -> None:
    network = PhiForCausalLM(PhiConfig(**SHAPE))
    torch.nn.init.normal_(network.lm_head.bias)
    network.save_pretrained(folder)


def reading_ahead(folder: Path) -> None:
    network = BertLMHeadModel(BertConfig(**{**SHAPE, "pad_token_id": 0}))
    network.save_pretrained(folder)


def with_half_the_tensors(folder: Path) -> None:
    saved(folder, "llama", tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def with_another_tokenizer(folder: Path) -> None:
    _, config = FAMILIES["llama"]
    LlamaForCausalLM(type(config)(**{**config.to_dict(), "vocab_size": 100})).save_pretrained(folder)


def of_nothing(folder: Path) -> None:
    folder.mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (without_head, "lm_head.weight: not in the files, it would be newly initialised"),
        (with_biased_head, "its logits are more than W times its last hidden states"),
        (reading_ahead, "more than W times|reads ahead"),
        (with_half_the_tensors, "lm_head.weight: not in the files, it would be newly initialised"),
        (with_another_tokenizer, "the tokenizer has 500 entries, the unembedding 100 rows"),
        (of_nothing, "cannot be read as a causal language model"),
    ],
)
def test_what_is_no_causal_language_model_is_refused_with_the_reason(
    tmp_path: Path, corpus: Path, make: Any, says: str
) -> None:
    make(tmp_path / "model")
    if make is with_another_tokenizer:
        corpus_tokenizer(corpus).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="nothing was imported") as caught:
        read_foreign(str(tmp_path / "model"))
    assert any(part in str(caught.value) for part in says.split("|"))


def test_a_model_without_an_output_embedding_leaves_a_row_that_says_which_and_why(
    tmp_path: Path, store_root: Path
) -> None:
    without_head(tmp_path / "model")
    with pytest.raises(InputError, match="nothing was imported"):
        import_models(store_root, str(tmp_path / "model"), [], name="m")
    with Store(store_root) as store:
        (refused,) = store.sql("select sweep, detail from events where kind = 'import_refused'").rows()
        assert store.sql("select * from checkpoints").rows() == []
    assert refused["sweep"] == "m"
    assert refused["detail"].startswith(f"{tmp_path / 'model'}: not all weights are there")
    assert "lm_head.weight: not in the files" in refused["detail"]


def test_losses_of_a_model_without_a_tokenizer_or_with_another_are_refused(
    tmp_path: Path, store_root: Path, corpus: Path
) -> None:
    saved(tmp_path / "bare", "llama")
    bare = folder_of(store_root, import_models(store_root, str(tmp_path / "bare"), []))
    with pytest.raises(InputError, match="imported without a tokenizer"):
        evaluate(bare, LOSS, corpora=corpus.parent)
    saved(tmp_path / "other", "llama")
    tokenizer = json.loads((corpus / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 500, "content": "<|more|>"})
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    other = folder_of(store_root, import_models(store_root, str(tmp_path / "other"), []))
    with pytest.raises(InputError, match="cut by another tokenizer") as caught:
        evaluate(other, LossSettings(suite="builtin"), corpora=corpus.parent)
    assert "501 entries" in str(caught.value)
