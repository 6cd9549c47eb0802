"""One checkpoint and one evaluator's settings in, metric values out.

checkpoint folder, EvaluatorSettings -> [evaluate] -> metric values -> store
in    a folder that trainers.checkpoint wrote; for losses the folder of prepared corpora
out   the same values for the same checkpoint and settings, on any day (CPU, same threads)
not   Ray, a store; threads are the caller's to set

What needs transformers (hidden, finetune, quantize) is imported when it is asked for: geometry and losses do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evaluators.config import (
    EvaluatorSettings,
    FinetuneSettings,
    GeometrySettings,
    HiddenSettings,
    LossSettings,
    QuantizeSettings,
)
from evaluators.geometry import unembedding_geometry
from evaluators.loss import suite_losses
from evaluators.metrics import MetricValue, Plain
from evaluators.suites import open_suite
from trainers.checkpoint import load_model, load_network, read_manifest, read_tensor
from trainers.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluators.finetune import Outcome
    from trainers.model import Network


def evaluate(
    checkpoint_dir: Path, settings: EvaluatorSettings, *, corpora: Path, device: str = "cpu"
) -> list[MetricValue]:
    """All values of one evaluation.

    corpora    folder of the prepared corpora: suites are found there by name
    device     "cpu" or "cuda"; geometry is always computed on the CPU
    raises     InputError if the folder is no checkpoint, its weights hold nan or inf, or the suite does not fit it;
               EnvironmentFault if a file is corrupt
    """
    return EVALUATORS[settings.evaluator](checkpoint_dir, settings, corpora, device)


def _geometry(checkpoint_dir: Path, settings: GeometrySettings, corpora: Path, device: str) -> list[MetricValue]:  # noqa: ARG001
    """Reads the unembedding and no other tensor."""
    manifest = read_manifest(checkpoint_dir)
    weight_RD = read_tensor(checkpoint_dir, manifest.unembedding)
    convention: dict[str, Plain] = {
        "matrix": "unembedding",
        "tensor": manifest.unembedding,
        "tied": manifest.tied,
        "dtype": str(weight_RD.dtype).removeprefix("torch."),
    }
    try:
        return unembedding_geometry(weight_RD, manifest.network.vocab_size, settings, convention)
    except InputError as error:
        raise _about(checkpoint_dir, f"{manifest.unembedding}: {error.headline}", error.problems) from None


def _hidden(checkpoint_dir: Path, settings: HiddenSettings, corpora: Path, device: str) -> list[MetricValue]:
    from evaluators.hidden import hidden_geometry

    manifest = read_manifest(checkpoint_dir)
    suite = open_suite(settings.suite, corpora, manifest.trained_on)
    return hidden_geometry(_finite_model(checkpoint_dir), suite, settings, manifest.network.context, device)


def _loss(checkpoint_dir: Path, settings: LossSettings, corpora: Path, device: str) -> list[MetricValue]:
    manifest = read_manifest(checkpoint_dir)
    suite = open_suite(settings.suite, corpora, manifest.trained_on)
    sequence_tokens = settings.sequence_tokens or manifest.network.context
    if sequence_tokens > manifest.network.context:
        raise InputError(
            f"{checkpoint_dir}: sequence_tokens: {sequence_tokens:,}, the model reads {manifest.network.context:,} at "
            f"most; nothing was evaluated"
        )
    return suite_losses(_finite_network(checkpoint_dir), suite, settings, sequence_tokens, device)


def fine_tune_checkpoint(checkpoint_dir: Path, settings: FinetuneSettings, corpora: Path, device: str) -> Outcome:
    """As evaluate, with the fine-tuned network beside the values."""
    from evaluators.finetune import fine_tune, open_texts

    manifest = read_manifest(checkpoint_dir)
    context = manifest.network.context
    texts = open_texts(settings, corpora, manifest.trained_on, context)
    return fine_tune(_finite_model(checkpoint_dir), manifest.unembedding, texts, settings, context, device)


def _finetune(checkpoint_dir: Path, settings: FinetuneSettings, corpora: Path, device: str) -> list[MetricValue]:
    return list(fine_tune_checkpoint(checkpoint_dir, settings, corpora, device).values)


def _quantize(checkpoint_dir: Path, settings: QuantizeSettings, corpora: Path, device: str) -> list[MetricValue]:
    from evaluators.quantize import open_calibration, quantised_losses

    manifest = read_manifest(checkpoint_dir)
    suite = open_suite(settings.suite, corpora, manifest.trained_on)
    calibration = open_calibration(settings, corpora, manifest.trained_on, suite, manifest.network.context)
    return quantised_losses(_finite_model(checkpoint_dir), suite, calibration, settings, device)


EVALUATORS: Mapping[str, Callable[[Path, Any, Path, str], list[MetricValue]]] = {
    "geometry": _geometry,
    "hidden": _hidden,
    "loss": _loss,
    "finetune": _finetune,
    "quantize": _quantize,
}


def _finite_network(checkpoint_dir: Path) -> Network:
    network = load_network(checkpoint_dir)
    _check_finite(network, checkpoint_dir)
    return network


def _finite_model(checkpoint_dir: Path) -> PreTrainedModel:
    network = load_model(checkpoint_dir)
    _check_finite(network, checkpoint_dir)
    return network


def _check_finite(network: torch.nn.Module, checkpoint_dir: Path) -> None:
    bad = [name for name, tensor in network.named_parameters() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise _about(checkpoint_dir, f"non_finite: {len(bad)} tensors hold nan or inf", [", ".join(bad[:5])])


def _about(checkpoint_dir: Path, headline: str, problems: list[str] | tuple[str, ...]) -> InputError:
    return InputError(f"{checkpoint_dir}: {headline}", problems, "nothing was measured; evaluate an earlier checkpoint")
