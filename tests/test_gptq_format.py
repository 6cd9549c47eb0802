"""Packed files: levels worked by hand, what the format cannot hold, and gptqmodel itself where it is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import tiny_recipe

from evaluators.config import QuantizeSettings
from evaluators.gptq_format import LARGEST_DIFFERENCE, dequantised, export_gptq, load_packed
from orchestrator.cli import app
from trainers.checkpoint import read_manifest as read_checkpoint
from trainers.config import Data
from trainers.errors import EnvironmentFault, InputError
from trainers.hugging_face import empty_hugging_face_model
from trainers.loop import Execution, Training
from trainers.tokens import read_manifest

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".cache" / "gptq-env"
CONTEXT = 32


def settings(**changes: Any) -> QuantizeSettings:
    small: dict[str, Any] = {"tokens_per_domain": 4096, "calibration_sequences": 256}
    return QuantizeSettings(suite="builtin", **{**small, **changes})


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers as rows of 32-bit words, through Python's own integers."""
    words = []
    for row in numbers.tolist():
        stream = sum(number << bits * i for i, number in enumerate(row))
        words.append([stream >> 32 * i & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    return np.array(words, np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_matrix_is_read_as_scale_times_level_minus_zero(bits: int) -> None:
    rng = np.random.default_rng(bits)
    inputs, outputs, groups = 64, 32, 4
    level_IO = rng.integers(0, 2**bits, (inputs, outputs))
    zero_PO = rng.integers(1, 2**bits, (groups, outputs))
    scale_PO = rng.random((groups, outputs)).astype(np.float16)
    g_idx = np.arange(inputs, dtype=np.int32) // (inputs // groups)
    found_OI = dequantised(packed(level_IO.T, bits).T, packed(zero_PO - 1, bits), scale_PO, g_idx, bits=bits)
    expected_IO = scale_PO[g_idx].astype(np.float64) * (level_IO - zero_PO[g_idx])
    np.testing.assert_allclose(found_OI.numpy().T, expected_IO, rtol=1e-6)


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["olmo", "pythia"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    recipe = tiny_recipe(family=request.param, token_budget=100 * 8 * CONTEXT)
    data = Data(corpus="builtin", digest=read_manifest(corpus).digest, repeat=False)
    training = Training.fresh(recipe.model_copy(update={"data": data}), corpus, Execution())
    training.train_to(recipe.token_budget, lambda: False, lambda _: None)
    target = tmp_path_factory.mktemp(request.param) / "checkpoint"
    training.save(target, segment="s", history="h", curve=())
    return target


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """As far as the checks look that come before it is used."""
    (tmp_path / "environment" / "bin").mkdir(parents=True)
    (tmp_path / "environment" / "bin" / "python").touch()
    return tmp_path / "environment"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"activation_order": True}, "activation_order: must be false"),
        ({"block_columns": 64}, "block_columns: 64, must be 128"),
        ({"group_size": 64}, "these have 32 of 32 inputs, 64 of 128 inputs"),
    ],
    ids=["order", "block", "group"],
)
def test_settings_that_the_format_cannot_hold_are_refused(
    checkpoint: Path, corpus: Path, environment: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match="cannot hold this") as caught:
        export_gptq(
            checkpoint, tmp_path / "out", settings(**changes), 4, corpora=corpus.parent, environment=environment
        )
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_target_that_exists_and_environment_that_does_not_are_refused(
    checkpoint: Path, corpus: Path, environment: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="already exists"):
        export_gptq(checkpoint, tmp_path, settings(), 4, corpora=corpus.parent, environment=environment)
    with pytest.raises(InputError, match="no environment with gptqmodel") as caught:
        export_gptq(checkpoint, tmp_path / "out", settings(), 4, corpora=corpus.parent, environment=tmp_path)
    assert caught.value.next_step == "make gptq-env"


def test_width_whose_bits_fill_no_whole_words_is_refused(corpus: Path, environment: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    data = Data(corpus="builtin", digest=read_manifest(corpus).digest, repeat=False)
    model = recipe.model.model_copy(update={"hidden_size": 48})
    training = Training.fresh(recipe.model_copy(update={"data": data, "model": model}), corpus, Execution())
    training.save(tmp_path / "0", segment="s", history="h", curve=())
    with pytest.raises(InputError, match="cannot hold this") as caught:
        export_gptq(tmp_path / "0", tmp_path / "out", settings(), 3, corpora=corpus.parent, environment=environment)
    assert caught.value.problems[0].startswith("model.layers.0.self_attn.q_proj: 48 inputs and 48 outputs, 3 bits")


def test_child_that_fails_is_a_fault_with_its_last_words_and_leaves_nothing(
    checkpoint: Path, corpus: Path, environment: Path, tmp_path: Path
) -> None:
    python = environment / "bin" / "python"
    python.write_text("#!/bin/sh\necho no room left\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(EnvironmentFault, match="exit code 3:\nno room left"):
        export_gptq(checkpoint, tmp_path / "out", settings(), 4, corpora=corpus.parent, environment=environment)
    assert list(tmp_path.iterdir()) == [environment]


def test_export_of_what_no_quantisation_has_is_refused_by_the_command(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    for more, says in (
        (["--gptq", "5"], "bits.0: Input should be 2, 3, 4 or 8, given 5"),
        (["--gptq", "4", "--settings", "{group: 32}"], "group: no such field; nearest is 'group_size'"),
        (["--gptq", "4", "--settings", "32"], "--settings 32: no mapping"),
        (["--gptq", "4"], f"{tmp_path / 'no'}: no environment with gptqmodel"),
        (["--settings", "{}"], "--settings: of --gptq only"),
    ):
        options = [*more, "--gptq-env", tmp_path / "no", "--store", corpus.parent]
        with pytest.raises(InputError, match=re.escape(says)):
            app(["export", str(checkpoint), str(tmp_path / "out"), *map(str, options)], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gptq
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_exported_model_reads_back_with_the_measured_losses(
    checkpoint: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "exported"
    found = export_gptq(checkpoint, target, settings(), bits, corpora=corpus.parent, environment=ENVIRONMENT)
    assert [d.dataset for d in found] == list(read_manifest(corpus).domains)
    assert all(abs(d.packed - d.expected) <= LARGEST_DIFFERENCE for d in found)
    assert {"config.json", "quantize_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in target.iterdir()
    }
    assert list(tmp_path.iterdir()) == [target]
    network = empty_hugging_face_model(read_checkpoint(checkpoint).recipe.model)
    load_packed(network, target, bits)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in network.parameters())


@pytest.mark.gptq
@pytest.mark.timeout(300)
def test_export_command_says_the_losses_of_what_it_wrote(
    checkpoint: Path, store_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--gptq": "4", "--settings": "{group_size: null, calibration_sequences: 64}", "--gptq-env": ENVIRONMENT}
    command = ["export", checkpoint, tmp_path / "out", *sum(options.items(), ()), "--store", store_root]
    app(list(map(str, command)), standalone_mode=False)
    printed = capsys.readouterr().out
    assert "docs: loss " in printed
    assert "4 bits a weight in the auto-gptq format" in printed
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text())["bits"] == 4
