"""How much a model loses when its weights are cut to a few bits: GPTQ, and round-to-nearest beside it.

checkpoint -> model, suite, calibration -> [quantize] -> metric values
in    a model, a suite, and calibration sequences from a training split
out   for each domain: the loss of the model as it is, and loss and increase after each method at each number of bits
not   packed files: a quantised weight is written back as the float32 number that it stands for

Quantised are the matrices of the blocks. Embeddings, unembedding, norms and biases stay, so the geometry of W does too;
in a 4M model the embeddings are most parameters.

How: blocks in order; in a block the groups of GROUPS in order, each with the inputs that come out of everything
quantised before it, as auto-gptq 0.7.1 does. The matrices of a group have one input, so one Hessian, and their rows do
not touch each other, so they are quantised as one matrix.

Letters: S sequences, T tokens, N positions, O outputs (rows) and I inputs (columns) of a matrix, G columns of a group.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evaluators.config import LossSettings, QuantizeSettings
from evaluators.loss import suite_losses
from evaluators.metrics import MetricValue, Plain, metric_value
from evaluators.suites import Suite, open_suite
from trainers.batches import TrainingSequences
from trainers.config import Data, Imported
from trainers.errors import InputError
from trainers.model import body
from trainers.tokens import open_split

_TOKENS_PER_FORWARD = 2048  # bounds the memory of a forward pass; a constant, since the last bits depend on it
_LARGEST_DAMP = 1.0
_DAMP_GROWTH = 10.0

_LLAMA_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.up_proj", "mlp.gate_proj"),
    ("mlp.down_proj",),
)
_NEOX_GROUPS = (("attention.query_key_value",), ("attention.dense",), ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",))

GROUPS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "llama": _LLAMA_GROUPS,
    "olmo": _LLAMA_GROUPS,
    "olmo2": _LLAMA_GROUPS,
    "gpt_neox": _NEOX_GROUPS,
    "gpt2": (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
}
"""By transformers' model_type: the matrices of a block, those with the same input together, in order of their use."""


# ---- one matrix ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The levels of each row: scale * (k - zero), k = 0 to highest.

    scale, zero   (O, 1) float32; zero is a whole number
    """

    scale: Tensor
    zero: Tensor
    highest: int

    def nearest(self, weight_OG: Tensor) -> Tensor:
        """The nearest level of every entry; entries outside the grid go to its ends."""
        level_OG = torch.clamp(torch.round(weight_OG / self.scale) + self.zero, 0, self.highest)
        return self.scale * (level_OG - self.zero)


def grid_of(weight_OG: Tensor, bits: int, symmetric: bool) -> Grid:
    """The grid of each row of a group of columns: from its smallest to its largest entry, 0 always inside.

    symmetric   from -m to m, m the row's largest magnitude. A row without a negative entry keeps 0 to m, while its
                zero stays in the middle of the levels: what is above m / 2 is cut. That is auto-gptq's rule; it meets
                short groups only
    source      auto-gptq 0.7.1 quantizer.find_params, without its search over the mean squared error. In float32 as
                there: where symmetric, the entry -m lies midway between two levels, and the last bit decides
    """
    highest = 2**bits - 1
    low_O1 = weight_OG.amin(1, keepdim=True).clamp(max=0)
    high_O1 = weight_OG.amax(1, keepdim=True).clamp(min=0)
    if symmetric:
        high_O1 = torch.maximum(-low_O1, high_O1)
        low_O1 = torch.where(low_O1 < 0, -high_O1, low_O1)
    flat_O1 = (high_O1 - low_O1) / highest == 0  # all zero, or so near that the scale underflows
    low_O1, high_O1 = low_O1.masked_fill(flat_O1, -1), high_O1.masked_fill(flat_O1, 1)
    scale_O1 = (high_O1 - low_O1) / highest
    zero_O1 = torch.full_like(scale_O1, (highest + 1) / 2) if symmetric else torch.round(-low_O1 / scale_O1)
    return Grid(scale=scale_O1, zero=zero_O1, highest=highest)


def group_columns(settings: QuantizeSettings, inputs: int) -> int:
    """Columns that share a scale in a matrix of so many inputs; the last group may be shorter."""
    size = settings.group_size
    if size is None or size >= inputs or (inputs % size and settings.undivided == "row"):
        return inputs
    return size


def round_to_nearest(weight_OI: Tensor, bits: int, settings: QuantizeSettings) -> Tensor:
    """Every entry to the nearest level of its group's grid, float32: what GPTQ has to beat."""
    parts = torch.split(weight_OI, group_columns(settings, weight_OI.shape[1]), dim=1)
    return torch.cat([grid_of(part, bits, settings.symmetric).nearest(part) for part in parts], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curvature:
    """What GPTQ needs to know of the inputs of a matrix.

    order    (I,) the columns in the order in which they are quantised
    dead     (I,) whether a column's input was always zero
    factor   (I, I) float32, upper triangular, in that order: Cholesky factor of the inverse of the damped Hessian
    damp     share of the mean diagonal that was added
    """

    order: Tensor
    dead: Tensor
    factor: Tensor
    damp: float


def curvature_of(hessian_II: Tensor, settings: QuantizeSettings) -> Curvature:
    """The inverse of the Hessian, factored; in float64 up to the result.

    hessian_II   sum over positions of x x', x the input; any factor before it is without effect
    returns      the damp grows tenfold from settings.damp until the Cholesky factorisation works
    raises       InputError if an entry is nan or inf, or it does not work with a damp of 1 either
    """
    hessian_II = hessian_II.double().clone()
    if not bool(torch.isfinite(hessian_II).all()):
        raise InputError("the Hessian of its inputs holds nan or inf")
    diagonal_I = hessian_II.diagonal()
    dead_I = diagonal_I == 0
    diagonal_I[dead_I] = 1
    order_I = torch.arange(len(diagonal_I), device=hessian_II.device)
    if settings.activation_order:
        order_I = torch.argsort(diagonal_I, descending=True, stable=True)
    factor_II, damp = _inverse_factor(hessian_II[order_I][:, order_I], settings.damp)
    return Curvature(order=order_I, dead=dead_I, factor=factor_II, damp=damp)


def _inverse_factor(hessian_II: Tensor, damp: float) -> tuple[Tensor, float]:
    identity_II = torch.eye(len(hessian_II), dtype=hessian_II.dtype, device=hessian_II.device)
    mean_diagonal = hessian_II.diagonal().mean()
    while damp <= _LARGEST_DAMP:
        lower_II, failed = torch.linalg.cholesky_ex(hessian_II + damp * mean_diagonal * identity_II)
        if not failed:
            factor_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
        if not failed:
            return factor_II.float(), damp
        damp *= _DAMP_GROWTH
    raise InputError(f"the Hessian of its inputs is not positive definite, up to a damp of {damp / _DAMP_GROWTH:g}")


def gptq(weight_OI: Tensor, curvature: Curvature, bits: int, settings: QuantizeSettings) -> Tensor:
    """The quantised matrix whose outputs are near those of the matrix; float32, as the matrix.

    Each column is rounded, and its error made good in the columns that are still to come; a dead column becomes 0.
    source   Frantar et al., ICLR 2023, algorithm 1; scales as auto-gptq 0.7.1: of the whole row from the original
             weights, of a group from its weights as they are when the block begins in which the group does
    """
    grid = grid_of(weight_OI, bits, settings.symmetric)
    weight_OI = weight_OI.masked_fill(curvature.dead, 0)[:, curvature.order]
    factor_II, inputs = curvature.factor, weight_OI.shape[1]
    group = group_columns(settings, inputs)
    quantised_OI = torch.empty_like(weight_OI)
    for start in range(0, inputs, settings.block_columns):
        stop = min(start + settings.block_columns, inputs)
        block_OB, error_OB = weight_OI[:, start:stop].clone(), torch.empty_like(weight_OI[:, start:stop])
        for column in range(start, stop):
            if group < inputs and column % group == 0:
                grid = grid_of(weight_OI[:, column : column + group], bits, settings.symmetric)
            here = column - start
            column_O1 = block_OB[:, here : here + 1]
            quantised_O1 = grid.nearest(column_O1)
            error_O1 = (column_O1 - quantised_O1) / factor_II[column, column]
            block_OB[:, here + 1 :] -= error_O1 * factor_II[column, column + 1 : stop]
            quantised_OI[:, column : column + 1], error_OB[:, here : here + 1] = quantised_O1, error_O1
        weight_OI[:, stop:] -= error_OB @ factor_II[start:stop, stop:]
    return quantised_OI[:, torch.argsort(curvature.order)]


# ---- a model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedGroup:
    """Matrices with one input. name: of the first, below the blocks; columns: of a group that shares a scale."""

    name: str
    matrices: int
    parameters: int
    inputs: int
    columns: int
    damp: float
    dead: int


@torch.no_grad()
def round_model(network: PreTrainedModel, bits: int, settings: QuantizeSettings) -> None:
    """Round-to-nearest of every matrix of the blocks, in place."""
    for block in blocks(network):
        for _, matrices in _groups(network, block):
            for matrix in matrices:
                weight_OI = weight_of(matrix)
                weight_OI.copy_(round_to_nearest(weight_OI, bits, settings))


@torch.no_grad()
def gptq_model(
    network: PreTrainedModel, ids_ST: NDArray[np.int64], bits: int, settings: QuantizeSettings
) -> list[QuantisedGroup]:
    """GPTQ of every matrix of the blocks, in place.

    network   float32, on its device, in evaluation mode
    ids_ST    calibration sequences
    raises    InputError that names the matrix whose Hessian cannot be used
    """
    inputs = _first_inputs(network, ids_ST)
    done = []
    for number, block in enumerate(blocks(network)):
        for name, matrices in _groups(network, block):
            hessian_II = _input_hessian(block, matrices[0], inputs)
            done.append(_gptq_group(f"{number}.{name}", matrices, hessian_II, bits, settings))
        inputs = [replace(one, hidden=one.given_to(block)) for one in inputs]
    return done


def _gptq_group(
    name: str, matrices: Sequence[nn.Module], hessian_II: Tensor, bits: int, settings: QuantizeSettings
) -> QuantisedGroup:
    try:
        curvature = curvature_of(hessian_II, settings)
    except InputError as error:
        raise InputError(
            f"block {name}: {error.headline}", next_step="set a larger damp or other calibration"
        ) from None
    weights = [weight_of(matrix) for matrix in matrices]
    weight_OI = torch.cat(weights)
    quantised_OI = gptq(weight_OI, curvature, bits, settings)
    for part_OI, quantised in zip(weights, torch.split(quantised_OI, list(map(len, weights))), strict=True):
        part_OI.copy_(quantised)
    return QuantisedGroup(
        name=name,
        matrices=len(matrices),
        parameters=weight_OI.numel(),
        inputs=weight_OI.shape[1],
        columns=group_columns(settings, weight_OI.shape[1]),
        damp=curvature.damp,
        dead=int(curvature.dead.sum()),
    )


def blocks(network: PreTrainedModel) -> Sequence[nn.Module]:
    """The blocks of the network, in order."""
    inner = body(network)
    layers: Sequence[nn.Module] = inner.h if network.config.model_type == "gpt2" else inner.layers  # type: ignore[assignment]
    return layers


def weight_of(matrix: nn.Module) -> Tensor:
    """The weight of a linear map as (O, I), not a copy; GPT-2 keeps it the other way round."""
    weight: Tensor = matrix.weight  # type: ignore[assignment]  # every matrix of GROUPS has one
    return weight.T if isinstance(matrix, Conv1D) else weight


def _groups(network: PreTrainedModel, block: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    kind = network.config.model_type
    if kind not in GROUPS:
        raise InputError(f"models of type '{kind}' cannot be quantised; allowed: {', '.join(GROUPS)}")
    for names in GROUPS[kind]:
        yield names[0], [block.get_submodule(name) for name in names]


class _InputSeen(Exception):
    """No error: ends a forward pass where its rest is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockInput:
    """What a block is called with, a batch of sequences: hidden states (S, T, D), and the rest by place and by name."""

    hidden: Tensor
    others: tuple[Any, ...]
    named: Mapping[str, Any]

    def given_to(self, block: nn.Module) -> Tensor:
        made: Tensor = block(self.hidden, *self.others, **self.named)
        return made


def _first_inputs(network: PreTrainedModel, ids_ST: NDArray[np.int64]) -> list[_BlockInput]:
    """What the first block is called with."""
    found: list[_BlockInput] = []

    def keep(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(_BlockInput(hidden=given[0], others=given[1:], named=named))
        raise _InputSeen

    inner = body(network)
    at_once = max(1, _TOKENS_PER_FORWARD // ids_ST.shape[1])
    hook = blocks(network)[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for start in range(0, len(ids_ST), at_once):
            ids = torch.from_numpy(ids_ST[start : start + at_once]).to(network.device)
            with suppress(_InputSeen):
                inner(input_ids=ids, use_cache=False)  # a cache would keep the keys of each pass for the next
    finally:
        hook.remove()
    return found


def _input_hessian(block: nn.Module, matrix: nn.Module, inputs: Sequence[_BlockInput]) -> Tensor:
    """Sum over all positions of x x', x what the matrix is given: (I, I); float32 within a batch, float64 over them."""
    weight_OI = weight_of(matrix)
    size = weight_OI.shape[1]
    hessian_II = torch.zeros(size, size, dtype=torch.float64, device=weight_OI.device)

    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x_NI = given[0].flatten(0, -2)
        hessian_II.add_(x_NI.T @ x_NI)
        raise _InputSeen

    hook = matrix.register_forward_pre_hook(add)
    try:
        for one in inputs:
            with suppress(_InputSeen):
                one.given_to(block)
    finally:
        hook.remove()
    return hessian_II


# ---- an evaluation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Sequences that GPTQ sees.

    corpus, digest   of the corpus from whose training split they are;  ids   (S, T)
    """

    corpus: str
    digest: str
    ids: NDArray[np.int64]


def open_calibration(
    settings: QuantizeSettings, corpora: Path, trained_on: Data | Imported, suite: Suite, context: int
) -> Calibration:
    """The calibration sequences, never text of the suite.

    corpora   folder of the prepared corpora;  context   tokens of a sequence
    raises    InputError if the corpus is missing, was made with another tokenizer or is too small, or if it is not the
              suite's own, whose splits share no document, and a calibration sequence occurs in the evaluated tokens
    """
    name = settings.calibration_corpus or (trained_on.corpus if isinstance(trained_on, Data) else None)
    if name is None:
        raise InputError("calibration_corpus: missing; an imported model's training text is not known")
    source = open_suite(name, corpora, trained_on)
    order = TrainingSequences(
        source.folder, source.manifest, context=context, seed=settings.calibration_seed, repeat=False
    )
    calibration = Calibration(
        corpus=name, digest=source.manifest.digest, ids=order.read(0, settings.calibration_sequences)
    )
    if calibration.digest != suite.manifest.digest:
        _refuse_shared_text(calibration, suite, settings.tokens_per_domain)
    return calibration


def _refuse_shared_text(calibration: Calibration, suite: Suite, tokens_per_domain: int) -> None:
    """Two corpora may hold the same documents, split in different ways."""
    sequences = [_as_text(ids_T) for ids_T in calibration.ids]
    problems = []
    for one in suite.sets:
        ids_N = open_split(suite.folder, one.domain, "heldout").read(0, min(one.tokens, tokens_per_domain))
        evaluated = _as_text(ids_N)
        if shared := sum(sequence in evaluated for sequence in sequences):
            problems.append(f"{one.domain}: {shared} of {len(sequences)} calibration sequences are in its tokens")
    if problems:
        raise InputError(
            f"suite '{suite.name}' holds calibration text of corpus '{calibration.corpus}', nothing was evaluated",
            problems,
            "set another calibration_corpus or calibration_seed",
        )


def _as_text(ids_T: NDArray[np.int64]) -> str:
    """One character a token, so that Python's own search finds a sequence at any position."""
    return "".join(map(chr, ids_T.tolist()))


def quantised_losses(
    network: PreTrainedModel,
    suite: Suite,
    calibration: Calibration,
    settings: QuantizeSettings,
    device: str,
) -> list[MetricValue]:
    """The loss of every evaluation set before and after, GPTQ and round-to-nearest, at each number of bits.

    network   float32; it is moved to the device and else not changed
    returns   the loss before, then loss and increase of each method and bits; order of the suite within each
    raises    InputError as suite_losses; for a type of model without an entry in GROUPS; as gptq_model
    """
    network = network.to(device).eval()
    context = calibration.ids.shape[1]
    before = _losses(network, suite, settings, context, device)
    values = list(before)
    for bits in settings.bits:
        changed = copy.deepcopy(network)
        groups = gptq_model(changed, calibration.ids, bits, settings)
        rounding = _rounding_convention(groups, network, settings, bits)
        used = {**rounding, **_calibration_convention(groups, calibration, settings)}
        values += _compared("gptq", bits, before, _losses(changed, suite, settings, context, device), used)
        changed = copy.deepcopy(network)
        round_model(changed, bits, settings)
        values += _compared("rtn", bits, before, _losses(changed, suite, settings, context, device), rounding)
    return values


def _losses(
    network: PreTrainedModel, suite: Suite, settings: QuantizeSettings, context: int, device: str
) -> list[MetricValue]:
    """The loss of every evaluation set, measured in the precision of the settings."""
    asked = LossSettings(suite=settings.suite, tokens_per_domain=settings.tokens_per_domain)
    if settings.precision == "bfloat16":
        network = copy.deepcopy(network).to(torch.bfloat16)
    return [
        metric_value(
            value.metric,
            value.value,
            dataset=value.dataset,
            split=value.split,
            n=value.n,
            convention={**value.convention, "precision": settings.precision},
        )
        for value in suite_losses(network, suite, asked, context, device)
        if value.metric == "loss" and value.value is not None
    ]


def _compared(
    method: str,
    bits: int,
    before: Sequence[MetricValue],
    after: Sequence[MetricValue],
    convention: Mapping[str, Plain],
) -> list[MetricValue]:
    values = []
    for old, new in zip(before, after, strict=True):
        assert old.value is not None
        assert new.value is not None
        named: Mapping[str, Any] = {
            "dataset": new.dataset,
            "split": new.split,
            "n": new.n,
            "convention": {**new.convention, **convention},
        }
        values.append(metric_value(f"{method}_loss_{bits}bit", new.value, **named))
        values.append(metric_value(f"{method}_loss_increase_{bits}bit", new.value - old.value, **named))
    return values


def _rounding_convention(
    groups: Sequence[QuantisedGroup], network: PreTrainedModel, settings: QuantizeSettings, bits: int
) -> dict[str, Plain]:
    scales = sorted({(group.inputs, group.columns) for group in groups})
    return {
        "bits": bits,
        "quantised": "matrices of the blocks; embeddings, unembedding, norms and biases kept",
        "quantised_parameters": sum(group.parameters for group in groups),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "scales": "; ".join(f"{inputs} inputs: {'row' if inputs == g else f'group {g}'}" for inputs, g in scales),
        "symmetric": settings.symmetric,
    }


def _calibration_convention(
    groups: Sequence[QuantisedGroup], calibration: Calibration, settings: QuantizeSettings
) -> dict[str, Plain]:
    return {
        "calibration_corpus": calibration.corpus,
        "calibration_digest": calibration.digest,
        "calibration_split": "train",
        "calibration_sequences": len(calibration.ids),
        "hessian": "of the inputs after everything before was quantised",
        "damp": settings.damp,
        "damp_grown": json.dumps({group.name: group.damp for group in groups if group.damp != settings.damp}),
        "dead_columns": sum(group.dead for group in groups),
        "activation_order": settings.activation_order,
        "block_columns": settings.block_columns,
    }
