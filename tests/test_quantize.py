"""Quantisation against auto-gptq's own output, the algorithm written plainly, and what must not change."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import hugging_face_model, tiny_recipe
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from evaluators.config import GeometrySettings, LossSettings, QuantizeSettings
from evaluators.evaluate import evaluate
from evaluators.geometry import unembedding_geometry
from evaluators.loss import sequence_losses
from evaluators.quantize import (
    GROUPS,
    blocks,
    curvature_of,
    gptq,
    gptq_model,
    grid_of,
    group_columns,
    open_calibration,
    quantised_losses,
    round_model,
    round_to_nearest,
)
from evaluators.suites import open_suite
from trainers.checkpoint import load_model
from trainers.config import Data, Recipe
from trainers.corpus import SourceText
from trainers.errors import InputError
from trainers.loop import Execution, Training
from trainers.tokens import Settings, TrainedTokenizer, open_split, prepare, read_manifest

CASES = json.loads((Path(__file__).parent / "assets" / "gptq_cases.json").read_text())["cases"]
WIDTHS = [64, 144, 208, 528]  # hidden sizes of the ladder that 128, and most that 32, does not divide
STEPS = 400
CONTEXT = 32


def settings(**changes: Any) -> QuantizeSettings:
    return QuantizeSettings(suite="builtin", **changes)


def layer(inputs: int, outputs: int = 12, positions: int = 600) -> tuple[Tensor, Tensor]:
    """A weight (outputs, inputs), and inputs (positions, inputs) that are correlated and of different power."""
    generator = torch.Generator().manual_seed(inputs)
    mix = torch.randn(inputs, inputs, generator=generator) / inputs**0.5 + torch.eye(inputs)
    x_NI = torch.randn(positions, inputs, generator=generator) @ mix * torch.linspace(0.2, 2, inputs)
    return torch.randn(outputs, inputs, generator=generator) * 0.05, x_NI


def output_error(before_OI: Tensor, after_OI: Tensor, x_NI: Tensor) -> float:
    return float((x_NI.double() @ (before_OI - after_OI).double().T).square().sum())


# ---- one matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_gptq_of_a_layer_is_that_of_auto_gptq(case: dict[str, Any]) -> None:
    weight_OI, x_NI = torch.tensor(case["weight"]), torch.tensor(case["inputs"], dtype=torch.float64)
    asked = settings(
        group_size=None if case["group_size"] == -1 else case["group_size"],
        undivided="short",
        symmetric=case["sym"],
        activation_order=case["act_order"],
        damp=case["damp"],
    )
    found_OI = gptq(weight_OI, curvature_of(x_NI.T @ x_NI, asked), case["bits"], asked)
    np.testing.assert_allclose(found_OI, case["expect_weight"], atol=1e-6, rtol=0)
    assert output_error(weight_OI, found_OI, x_NI) == pytest.approx(case["expect_output_squared_error"], rel=1e-5)


def plain_gptq(weight_OI: Tensor, x_NI: Tensor, bits: int, damp: float) -> np.ndarray:
    """Column after column, the rest corrected through the inverse Hessian of what is left; one grid a row.

    Frantar et al. 2023, equations 2 and 3, without blocks and without the Cholesky factor.
    """
    weight, x = weight_OI.double().numpy().copy(), x_NI.double().numpy()
    hessian = x.T @ x
    hessian += damp * hessian.diagonal().mean() * np.eye(len(hessian))
    low, high = np.minimum(weight.min(1), 0), np.maximum(weight.max(1), 0)
    scale = (high - low) / (2**bits - 1)
    zero = np.round(-low / scale)
    for column in range(weight.shape[1]):
        inverse = np.linalg.inv(hessian[column:, column:])
        level = np.clip(np.round(weight[:, column] / scale) + zero, 0, 2**bits - 1)
        rounded = scale * (level - zero)
        error = (weight[:, column] - rounded) / inverse[0, 0]
        weight[:, column] = rounded
        weight[:, column + 1 :] -= np.outer(error, inverse[0, 1:])
    return weight


@pytest.mark.parametrize("block_columns", [1, 48, 128, 1000])
def test_gptq_is_the_plain_algorithm_whatever_the_block(block_columns: int) -> None:
    weight_OI, x_NI = layer(144)
    asked = settings(group_size=None, symmetric=False, block_columns=block_columns)
    found_OI = gptq(weight_OI, curvature_of(x_NI.double().T @ x_NI.double(), asked), 3, asked)
    np.testing.assert_allclose(found_OI, plain_gptq(weight_OI, x_NI, 3, 0.01), atol=1e-6)


@pytest.mark.parametrize("inputs", WIDTHS)
@pytest.mark.parametrize("changes", [{}, {"undivided": "short", "symmetric": False, "group_size": 32}])
def test_every_width_has_so_many_levels_and_less_error_than_rounding(inputs: int, changes: dict[str, Any]) -> None:
    weight_OI, x_NI = layer(inputs)
    asked = settings(**changes)
    curvature = curvature_of(x_NI.T @ x_NI, asked)
    errors = []
    for bits in (2, 3, 4, 8):
        found_OI, nearest_OI = gptq(weight_OI, curvature, bits, asked), round_to_nearest(weight_OI, bits, asked)
        for matrix_OI in (found_OI, nearest_OI):
            for group in torch.split(matrix_OI, group_columns(asked, inputs), dim=1):
                assert max(len(row.unique()) for row in group) <= 2**bits
        errors.append(output_error(weight_OI, found_OI, x_NI))
        assert errors[-1] < output_error(weight_OI, nearest_OI, x_NI)
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("inputs", "group_size", "undivided", "columns"),
    [
        (256, 128, "row", 128),
        (144, 128, "row", 144),
        (144, 128, "short", 128),
        (64, 128, "short", 64),
        (144, None, "short", 144),
    ],
)
def test_group_that_does_not_divide_the_inputs_is_the_row_or_ends_short(
    inputs: int, group_size: int | None, undivided: Any, columns: int
) -> None:
    assert group_columns(settings(group_size=group_size, undivided=undivided), inputs) == columns


def test_grid_of_a_row_worked_by_hand() -> None:
    weight_OG = torch.tensor([[-0.75, 0.3, 0.1], [0.0, 0.0, 0.0], [0.6, 0.2, 0.0], [1e-45, 0.0, 0.0]])
    symmetric = grid_of(weight_OG, 2, symmetric=True)  # scale 0.5, levels -1, -0.5, 0, 0.5 in the first row
    torch.testing.assert_close(symmetric.scale[:3, 0], torch.tensor([0.5, 2 / 3, 0.2]))
    torch.testing.assert_close(symmetric.nearest(weight_OG)[0], torch.tensor([-1.0, 0.5, 0.0]))
    torch.testing.assert_close(symmetric.nearest(weight_OG)[2], torch.tensor([0.2, 0.2, 0.0]))  # cut, as auto-gptq
    asymmetric = grid_of(weight_OG, 2, symmetric=False)  # -0.7, -0.35, 0, 0.35
    torch.testing.assert_close(asymmetric.nearest(weight_OG)[0], torch.tensor([-0.7, 0.35, 0.0]))
    for grid in (symmetric, asymmetric):
        assert grid.nearest(weight_OG)[1].tolist() == grid.nearest(weight_OG)[3].tolist() == [0, 0, 0]


def test_dead_columns_become_zero_and_the_others_stay_good() -> None:
    weight_OI, x_NI = layer(64)
    x_NI[:, [3, 40]] = 0
    curvature = curvature_of(x_NI.T @ x_NI, settings())
    found_OI = gptq(weight_OI, curvature, 4, settings())
    assert curvature.dead.nonzero().flatten().tolist() == [3, 40]
    assert not found_OI[:, [3, 40]].any()
    nearest_OI = round_to_nearest(weight_OI, 4, settings())
    assert output_error(weight_OI, found_OI, x_NI) < output_error(weight_OI, nearest_OI, x_NI)


@pytest.mark.parametrize(("smallest", "damp"), [(1.0, 0.01), (-0.02, 0.1), (-0.3, 1.0)])
def test_damp_grows_tenfold_until_the_hessian_is_positive(smallest: float, damp: float) -> None:
    hessian_II = torch.diag(torch.tensor([1.0, 1.0, smallest]))
    assert curvature_of(hessian_II, settings()).damp == pytest.approx(damp)


@pytest.mark.parametrize(
    ("smallest", "says"), [(-2.0, "not positive definite, up to a damp of 1"), (float("nan"), "holds nan or inf")]
)
def test_hessian_that_no_damp_mends_is_refused(smallest: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        curvature_of(torch.diag(torch.tensor([1.0, smallest])), settings())


# ---- a model ---------------------------------------------------------------------------------------------------------


def network_of(family: str) -> PreTrainedModel:
    if family in ("olmo", "pythia"):
        recipe = tiny_recipe(family=family)
        return hugging_face_model(recipe.model.model_copy(update={"init_std": 0.2}), seed=1).eval()
    torch.manual_seed(1)
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=500, initializer_range=0.2, **shape)).eval()
    kind, config = {"olmo1": (OlmoForCausalLM, OlmoConfig), "olmo2": (Olmo2ForCausalLM, Olmo2Config)}[family]
    shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(config(vocab_size=500, initializer_range=0.2, pad_token_id=None, **shape)).eval()


def calibration_ids(sequences: int = 40) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 500, (sequences, CONTEXT))


def linear_maps(network: PreTrainedModel) -> dict[str, nn.Module]:
    """All of the blocks, the head not among them."""
    head = network.get_output_embeddings()
    return {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}


ALL = ["olmo", "pythia", "olmo1", "olmo2", "gpt2"]


@pytest.mark.parametrize("family", ALL)
def test_every_matrix_is_quantised_with_the_inputs_that_the_quantised_network_gives_it(family: str) -> None:
    before, after, ids = network_of(family), network_of(family), calibration_ids()
    done = gptq_model(after, ids, 3, settings())
    hessians: dict[str, Tensor] = {}
    for name, matrix in linear_maps(after).items():

        def add(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
            x_NI = given[0].flatten(0, -2).double()
            hessians[name] = hessians.get(name, 0) + x_NI.T @ x_NI

        matrix.register_forward_pre_hook(add)
    with torch.no_grad():
        after(input_ids=torch.from_numpy(ids))
    assert sum(group.matrices for group in done) == len(linear_maps(before)) == len(hessians)
    for name, matrix in linear_maps(before).items():
        turn = torch.t if family == "gpt2" else torch.clone  # it keeps its matrices as (inputs, outputs)
        weight_OI = turn(matrix.weight.detach())
        expected_OI = gptq(weight_OI, curvature_of(hessians[name], settings()), 3, settings())
        torch.testing.assert_close(turn(after.get_submodule(name).weight), expected_OI, atol=1e-6, rtol=0)
        assert not torch.equal(expected_OI, weight_OI)


@pytest.mark.parametrize("family", ["olmo", "pythia", "gpt2"])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_all_but_the_matrices_of_the_blocks_stays_and_so_does_the_geometry(family: str, method: str) -> None:
    before, after = network_of(family), network_of(family)
    if method == "gptq":
        gptq_model(after, calibration_ids(), 2, settings())
    else:
        round_model(after, 2, settings())
    changed = {f"{name}.weight" for name in linear_maps(before)}
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(old, new) == (name not in changed), name
    old, new = (
        unembedding_geometry(n.get_output_embeddings().weight.detach(), 500, GeometrySettings(), {})
        for n in (before, after)
    )
    assert old == new


@pytest.mark.parametrize("family", ALL)
def test_groups_name_every_matrix_of_a_block_once(family: str) -> None:
    network = network_of(family)
    named = [name for group in GROUPS[network.config.model_type] for name in group]
    found = [name for name, module in blocks(network)[0].named_modules() if isinstance(module, nn.Linear | Conv1D)]
    assert sorted(named) == sorted(found)


def test_quantised_network_is_the_same_bits_again() -> None:
    first, second = network_of("olmo"), network_of("olmo")
    assert gptq_model(first, calibration_ids(), 3, settings()) == gptq_model(second, calibration_ids(), 3, settings())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_network_that_gives_no_usable_hessian_is_refused_with_the_matrix() -> None:
    network = network_of("olmo")
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(InputError, match=r"block 1\.mlp\.down_proj: the Hessian of its inputs holds nan or inf"):
        gptq_model(network, calibration_ids(), 3, settings())


def test_unknown_type_of_network_is_refused() -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    network = PhiForCausalLM(PhiConfig(vocab_size=10, pad_token_id=None, **shape))
    with pytest.raises(InputError, match="type 'phi' cannot be quantised; allowed: llama"):
        round_model(network, 4, settings())


# ---- an evaluation ---------------------------------------------------------------------------------------------------


def recipe_of(corpus: Path, family: str) -> Recipe:
    recipe = tiny_recipe(family=family, token_budget=STEPS * 8 * CONTEXT)
    data = Data(corpus="builtin", digest=read_manifest(corpus).digest, repeat=False)
    return recipe.model_copy(update={"data": data})


@pytest.fixture(scope="module", params=["olmo", "pythia"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A model that has learnt something: 100,000 tokens of the built-in corpus."""
    recipe = recipe_of(corpus, request.param)
    training = Training.fresh(recipe, corpus, Execution())
    training.train_to(recipe.token_budget, lambda: False, lambda _: None)
    target = tmp_path_factory.mktemp(request.param) / "checkpoint"
    training.save(target, segment="s", history="h", curve=())
    return target


def test_gptq_of_a_trained_model_beats_rounding_to_nearest(checkpoint: Path, corpus: Path) -> None:
    asked = settings(bits=(3,), tokens_per_domain=8192, calibration_sequences=256)
    found = {(v.metric, v.dataset): v for v in evaluate(checkpoint, asked, corpora=corpus.parent)}
    domains = read_manifest(corpus).domains
    plain = evaluate(checkpoint, LossSettings(suite="builtin", tokens_per_domain=8192), corpora=corpus.parent)
    for loss in (v for v in plain if v.metric == "loss"):
        before = found["loss", loss.dataset]
        assert (before.value, before.n, before.split) == (loss.value, loss.n, "heldout")
        for method in ("gptq", "rtn"):
            after, increase = (found[f"{method}_{name}_3bit", loss.dataset] for name in ("loss", "loss_increase"))
            assert increase.value == after.value - before.value
            assert after.n == loss.n
    assert len(found) == 5 * len(domains)
    gptq_increase, rtn_increase = (found[f"{method}_loss_increase_3bit", "docs"] for method in ("gptq", "rtn"))
    assert gptq_increase.value < rtn_increase.value
    convention = gptq_increase.convention
    assert convention["calibration_digest"] == read_manifest(corpus).digest
    assert convention["scales"] == "32 inputs: row; 128 inputs: row"
    assert (convention["calibration_sequences"], convention["damp_grown"]) == (256, "{}")
    assert "damp" not in rtn_increase.convention


def test_gptq_keeps_the_losses_of_single_tokens_nearer_than_rounding(checkpoint: Path, corpus: Path) -> None:
    network = load_model(checkpoint).eval()
    suite = open_suite("builtin", corpus.parent, recipe_of(corpus, "olmo").data)
    asked = settings(calibration_sequences=256)
    calibration = open_calibration(asked, corpus.parent, recipe_of(corpus, "olmo").data, suite, CONTEXT)
    evaluated = heldout_ids(corpus)
    losses_N = sequence_losses(network, evaluated)
    for bits in (2, 3, 4):
        moved, rounded = copy.deepcopy(network), copy.deepcopy(network)
        gptq_model(moved, calibration.ids, bits, asked)
        round_model(rounded, bits, asked)
        distance = [np.square(sequence_losses(n, evaluated) - losses_N).mean() for n in (moved, rounded)]
        assert distance[0] < 0.8 * distance[1]


def heldout_ids(corpus: Path) -> np.ndarray:
    """Held-out sequences of the domain that the model was trained on."""
    return open_split(corpus, "docs", "heldout").read(0, 256 * CONTEXT).reshape(-1, CONTEXT)


def test_losses_in_bfloat16_are_near_and_say_so(corpus: Path) -> None:
    data = recipe_of(corpus, "olmo").data
    suite, network = open_suite("builtin", corpus.parent, data), network_of("olmo")
    found = {}
    for precision in ("float32", "bfloat16"):
        asked = settings(bits=(4,), tokens_per_domain=1024, calibration_sequences=8, precision=precision)
        calibration = open_calibration(asked, corpus.parent, data, suite, CONTEXT)
        found[precision] = quantised_losses(network, suite, calibration, asked, "cpu")
    assert network.dtype == torch.float32
    for exact, coarse in zip(found["float32"], found["bfloat16"], strict=True):
        assert coarse.convention["precision"] == "bfloat16"
        assert coarse.value == pytest.approx(exact.value, abs=0.05)
        assert coarse.value != exact.value


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents twice: of those that `lib` holds out (30 %), `again` trains on all but 10 %."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(400)]
    rows = [json.dumps({"text": " ".join(rng.choices(words, k=60))}) for _ in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    for name, percent in (("lib", 30), ("again", 10)):
        trained = TrainedTokenizer(vocab_size=300, sample_bytes=100_000)
        text = SourceText(
            text_column="text", domain_column=None, hub_split="train", max_bytes=None, heldout_percent=percent
        )
        tokenizer = trained if name == "lib" else str(folder / "lib" / "tokenizer.json")
        made = Settings(text=text, tokenizer=tokenizer, shard_tokens=2**20)
        prepare(str(folder / "texts.jsonl"), folder / name, settings=made)
    return folder


def data_of(corpora: Path) -> Data:
    return Data(corpus="lib", digest=read_manifest(corpora / "lib").digest, repeat=False)


def test_calibration_is_training_text_of_the_corpus_that_the_checkpoint_knows(corpora: Path) -> None:
    data, asked = data_of(corpora), settings(calibration_sequences=50)
    suite = open_suite("lib", corpora, data)
    found = open_calibration(asked, corpora, data, suite, CONTEXT)
    assert (found.corpus, found.digest, found.ids.shape) == ("lib", data.digest, (50, CONTEXT))
    other = open_calibration(settings(calibration_sequences=50, calibration_seed=1), corpora, data, suite, CONTEXT)
    assert not np.array_equal(found.ids, other.ids)


def test_calibration_text_that_is_evaluated_is_refused(corpora: Path) -> None:
    data, asked = data_of(corpora), settings(calibration_corpus="again", calibration_sequences=50)
    suite = open_suite("lib", corpora, data)
    with pytest.raises(InputError, match="holds calibration text of corpus 'again'") as caught:
        open_calibration(asked, corpora, data, suite, CONTEXT)
    assert "of 50 calibration sequences are in its tokens" in caught.value.problems[0]


def test_calibration_that_the_corpus_cannot_give_is_refused(corpora: Path) -> None:
    data = data_of(corpora)
    suite = open_suite("lib", corpora, data)
    with pytest.raises(InputError, match="ends before sequence"):
        open_calibration(settings(calibration_sequences=10**6), corpora, data, suite, CONTEXT)
    with pytest.raises(InputError, match="no corpus 'pile'"):
        open_calibration(settings(calibration_corpus="pile"), corpora, data, suite, CONTEXT)
