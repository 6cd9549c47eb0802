"""A checkpoint as packed files in the auto-gptq format, for programs that read it.

checkpoint, calibration -> [gptq_format] -> gptqmodel (a child process) -> checked folder
in    a checkpoint and the settings of `quantize`
out   a folder that transformers, vLLM and gptqmodel load; it appears whole, or not at all
not   a measurement: the stored losses are those of quantize.py, and a folder that loses more or less is refused

gptqmodel lives in an environment of its own (`make gptq-env`); gptq_child.py says why.

Letters: I inputs and O outputs of a matrix, P groups of its inputs.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from evaluators.config import LossSettings, QuantizeSettings, settings_from
from evaluators.hub import corpus_tokenizer, folder_beside
from evaluators.loss import suite_losses
from evaluators.quantize import Calibration, blocks, gptq_model, group_columns, open_calibration
from evaluators.suites import Suite, open_suite
from trainers.checkpoint import load_model, read_manifest
from trainers.config import Recipe
from trainers.errors import EnvironmentFault, InputError

LARGEST_DIFFERENCE = 1e-3  # nats a token, of the packed model's loss from that of quantize.py, on any evaluation set
_PACKED = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Loss of one evaluation set in nats a token: by quantize.py, and by the packed files."""

    dataset: str
    expected: float
    packed: float


def export_settings(checkpoint_dir: Path, bits: int, changes: Mapping[str, object]) -> QuantizeSettings:
    """Settings of `quantize` for an export: losses on the corpus of the training, else the defaults, but for `changes`.

    raises   InputError for an imported model, and with every faulty field
    """
    trained_on = _recipe(checkpoint_dir).data.corpus
    settings = settings_from({"suite": trained_on, **changes, "evaluator": "quantize", "bits": [bits]})
    assert isinstance(settings, QuantizeSettings)
    return settings


def _recipe(checkpoint_dir: Path) -> Recipe:
    recipe = read_manifest(checkpoint_dir).recipe
    if recipe is None:
        raise InputError(f"{checkpoint_dir}: an imported model, export it from where it came")
    return recipe


def export_gptq(
    checkpoint_dir: Path, target: Path, settings: QuantizeSettings, bits: int, *, corpora: Path, environment: Path
) -> list[Difference]:
    """Write `target`: config.json, quantize_config.json, model.safetensors, the tokenizer.

    corpora       folder of the prepared corpora, of the calibration and of the suite that both losses are measured on
    environment   made by `make gptq-env`
    returns       the losses that were compared
    raises        InputError if target exists, the environment does not, the format cannot hold a matrix or the
                  settings, or a loss differs by more than LARGEST_DIFFERENCE; EnvironmentFault if the child fails
    """
    recipe = _recipe(checkpoint_dir)
    network = load_model(checkpoint_dir).eval()
    _refuse(target, environment, network, settings, bits)
    suite = open_suite(settings.suite, corpora, recipe.data)
    calibration = open_calibration(settings, corpora, recipe.data, suite, recipe.model.context)
    with folder_beside(target.absolute()) as folder:
        network.save_pretrained(folder / "model")
        corpus_tokenizer(corpora / recipe.data.corpus).save_pretrained(folder / "model")
        request = {
            "bits": bits,
            "group_size": _common_group_size(network, settings),
            "sym": settings.symmetric,
            "damp": settings.damp,
        }
        _quantise_in_child(folder, calibration, request, environment)
        packed = folder / "packed"
        _name_head_as_on_disk(packed, network)
        expected, found = copy.deepcopy(network), network
        gptq_model(expected, calibration.ids, bits, settings)
        load_packed(found, packed, bits)
        differences = _differences(expected, found, suite, settings, recipe.model.context)
        _refuse_different(target, differences, expected, found)
        packed.rename(target)
    return differences


def _refuse(target: Path, environment: Path, network: PreTrainedModel, settings: QuantizeSettings, bits: int) -> None:
    if target.exists():
        raise InputError(f"{target}: already exists, nothing was exported")
    if not (environment / "bin" / "python").exists():
        raise InputError(f"{environment}: no environment with gptqmodel, nothing was exported", (), "make gptq-env")
    if problems := [*_setting_problems(network, settings), *_width_problems(network, bits)]:
        raise InputError(f"{target}: the auto-gptq format cannot hold this, nothing was exported", problems)


def _setting_problems(network: PreTrainedModel, settings: QuantizeSettings) -> Iterator[str]:
    if settings.activation_order:
        yield "activation_order: must be false"
    if settings.block_columns != 128:
        yield f"block_columns: {settings.block_columns}, must be 128"
    if _common_group_size(network, settings) is None:
        sizes = _group_sizes(network, settings).items()
        found = ", ".join(f"{size} of {inputs} inputs" for inputs, size in sorted(sizes))
        yield f"group_size: one for all matrices is needed, these have {found}; set null or one that divides them all"


def _common_group_size(network: PreTrainedModel, settings: QuantizeSettings) -> int | None:
    """As gptqmodel says it: -1 for whole rows; None if the matrices differ."""
    sizes = _group_sizes(network, settings)
    if all(inputs == size for inputs, size in sizes.items()):
        return -1
    same = len(set(sizes.values())) == 1 and not any(inputs % size for inputs, size in sizes.items())
    return settings.group_size if same else None


def _group_sizes(network: PreTrainedModel, settings: QuantizeSettings) -> dict[int, int]:
    return {m.in_features: group_columns(settings, m.in_features) for m in _matrices(network).values()}


def _width_problems(network: PreTrainedModel, bits: int) -> list[str]:
    """Packed entries fill whole 32-bit words; gptqmodel 7.6.0 ends the process where they do not."""
    return [
        f"{name}: {matrix.in_features} inputs and {matrix.out_features} outputs, {bits} bits of each do not fill "
        f"whole words of 32"
        for name, matrix in _matrices(network).items()
        if matrix.in_features * bits % 32 or matrix.out_features * bits % 32
    ]


def _matrices(network: PreTrainedModel) -> dict[str, nn.Linear]:
    """The matrices of the blocks by their name among the parameters."""
    inside = {module for block in blocks(network) for module in block.modules()}
    return {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear) and m in inside}


def _quantise_in_child(folder: Path, calibration: Calibration, config: Mapping[str, object], environment: Path) -> None:
    np.save(folder / "calibration.npy", calibration.ids)
    paths = {"model": "model", "target": "packed", "calibration": "calibration.npy"}
    request = {**config, **{name: str(folder / path) for name, path in paths.items()}}
    (folder / "request.json").write_text(json.dumps(request))
    variables = {
        **os.environ,
        "GPTQMODEL_CPU_WORKERS": "2",
        "TORCHDYNAMO_DISABLE": "1",  # else it compiles C++ at the first packing
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "PYTHONHASHSEED": "0",  # its order of matrices may hang on it
    }
    command = [environment.absolute() / "bin" / "python", Path(__file__).with_name("gptq_child.py")]
    child = subprocess.run(
        [*command, folder / "request.json"],
        cwd=folder,  # it leaves a folder of logs where it runs
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode or not (folder / "packed" / "model.safetensors").exists():
        said = "\n".join((child.stdout + child.stderr).strip().splitlines()[-5:])
        raise EnvironmentFault("worker_killed", f"gptqmodel ended with exit code {child.returncode}:\n{said}")


def _name_head_as_on_disk(packed: Path, network: PreTrainedModel) -> None:
    """GPT-NeoX keeps its head as embed_out on disk; a file that says lm_head loads silently with a random head."""
    if network.config.model_type == "gpt_neox":
        tensors = load_file(packed / "model.safetensors")
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
        save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})


def _differences(
    expected: PreTrainedModel, found: PreTrainedModel, suite: Suite, settings: QuantizeSettings, context: int
) -> list[Difference]:
    asked = LossSettings(suite=settings.suite, tokens_per_domain=settings.tokens_per_domain)
    pairs = zip(*(suite_losses(n, suite, asked, context, "cpu") for n in (expected, found)), strict=True)
    return [
        Difference(dataset=str(old.dataset), expected=old.value, packed=new.value)
        for old, new in pairs
        if old.metric == "loss" and old.value is not None and new.value is not None
    ]


def _refuse_different(
    target: Path, differences: list[Difference], expected: PreTrainedModel, found: PreTrainedModel
) -> None:
    problems = [
        f"{d.dataset}: {d.packed:.5f}, {d.expected:.5f} was measured"
        for d in differences
        if abs(d.packed - d.expected) > LARGEST_DIFFERENCE
    ]
    if problems:
        raise InputError(
            f"{target}: the packed model has another loss than the measured one (by more than {LARGEST_DIFFERENCE:g} "
            f"nats a token), nothing was exported",
            [*problems, _tipped(expected, found)],
            "take a group_size (32 keeps such errors inside a group) or more bits",
        )


def _tipped(expected: PreTrainedModel, found: PreTrainedModel) -> str:
    """Why two GPTQs of one model differ: where a weight lies midway between two levels the last bit decides.

    Each such weight changes the inputs of all matrices after it, and few bits and long rows make the steps large. What
    the format itself rounds, the scales to 16 bits, is 2^-11 of a weight and moves a loss by 1e-5.
    """
    before, after = _matrices(expected), _matrices(found)
    moved = {
        name: int(((before[name].weight - after[name].weight).abs() > before[name].weight.abs() * 2**-9).sum())
        for name in before
    }
    first = next((name for name, count in moved.items() if count), "none")
    weights = sum(matrix.weight.numel() for matrix in before.values())
    return (
        f"gptqmodel put {sum(moved.values()):,} of {weights:,} weights on another level, {first} the first: a weight "
        f"midway between two levels tips with the last bit of a sum, and what is quantised after it follows"
    )


# ---- reading the format ----------------------------------------------------------------------------------------------


def load_packed(network: PreTrainedModel, packed: Path, bits: int) -> None:
    """Fill the network with the weights that a folder in the auto-gptq format stands for.

    raises   InputError if the folder and the network have different tensors
    """
    tensors = load_file(packed / "model.safetensors")
    weights = {
        f"{name}.weight": dequantised(*(tensors.pop(f"{name}.{part}").numpy() for part in _PACKED), bits=bits)
        for name in _matrices(network)
    }
    if "embed_out.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    weights |= {name: tensor.float() for name, tensor in tensors.items()}
    expected = set(dict(network.named_parameters()))
    if set(weights) != expected:
        raise InputError(f"{packed}: other tensors than the network's", sorted(set(weights) ^ expected))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(weights[name])


def dequantised(
    qweight: NDArray[np.int32],
    qzeros: NDArray[np.int32],
    scales: NDArray[np.float16],
    g_idx: NDArray[np.int32],
    *,
    bits: int,
) -> Tensor:
    """A packed matrix as (O, I) float32.

    qweight   (I * bits / 32, O): the levels of each output, packed along the inputs
    qzeros    (P, O * bits / 32): the zeros less 1, packed along the outputs;  scales   (P, O)
    g_idx     (I,) group of each input
    source    auto-gptq 0.7.1, checkpoint_format "gptq"
    """
    level_IO = _unpacked(qweight.T, bits).T
    zero_PO = _unpacked(qzeros, bits) + 1
    weight_IO = scales[g_idx].astype(np.float32) * (level_IO - zero_PO[g_idx]).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(weight_IO.T))


def _unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.int64]:
    """Rows of 32-bit words as rows of numbers of so many bits, the lowest bits first."""
    stream = np.unpackbits(np.ascontiguousarray(words).astype("<i4").view(np.uint8), axis=1, bitorder="little")
    return stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))
