"""The training loop: one recipe from one token count to another, on one device.

recipe, corpus, fresh weights or a checkpoint -> [loop] -> curve records, a checkpoint
in    Recipe (config.py), the folder of its corpus, and Execution: how this machine does it
out   after each step a CurveRecord to the caller; when asked, a checkpoint of the exact state between two steps
not   Ray, a store, a sweep; when to stop and what to keep is the caller's

Letters: B sequences in a batch, T tokens in a sequence, D hidden size; N = B (T - 1) predictions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from trainers.batches import TrainingSequences
from trainers.checkpoint import (
    CheckpointManifest,
    Circumstances,
    CurveRecord,
    circumstances,
    load_network,
    read_manifest,
    read_state,
    write_checkpoint,
)
from trainers.config import Recipe
from trainers.errors import InputError
from trainers.head import mean_loss
from trainers.model import body, build_model, unembedding, unembedding_name
from trainers.optim import AdamW
from trainers.schedule import learning_rates, step_of
from trainers.tokens import read_manifest as read_corpus

__all__ = ["CurveRecord", "Ending", "Execution", "Snapshot", "Training"]

if TYPE_CHECKING:
    from trainers.model import Network

RANDOM_STATE = "random_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a machine trains; it may move a result by rounding only, is recorded, and is never part of an id.

    device                "cpu", "cuda", "cuda:1", ...
    threads               of torch on the CPU; the same count gives the same bits
    micro_batch           sequences a forward pass, for memory; None for the whole batch
    compile               whether by torch.compile
    compress_checkpoints  whether the files of tensors are packed: a seventh smaller, several times slower to write
    """

    device: str = "cpu"
    threads: int = 1
    micro_batch: int | None = None
    compile: bool = False
    compress_checkpoints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why training returned, at which token count; `reason` says what diverged. The state is whole in every case."""

    kind: Literal["reached", "stopped", "diverged"]
    tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a training between two steps, as it is written; training may go on meanwhile if it is a copy."""

    recipe: Recipe
    tokens: int
    steps: int
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    made: Circumstances
    compress: bool

    def write(
        self,
        target: Path,
        *,
        segment: str,
        history: str,
        curve: Sequence[CurveRecord],
        temporary: Path | None = None,
    ) -> CheckpointManifest:
        """Write it as a checkpoint folder (write_checkpoint says how). curve: the steps since the last one."""
        return write_checkpoint(
            target,
            weights=self.weights,
            state=self.state,
            curve=curve,
            recipe=self.recipe,
            segment=segment,
            history=history,
            tokens=self.tokens,
            steps=self.steps,
            made=self.made,
            temporary=temporary,
            compress=self.compress,
        )


class Training:
    """A model, its optimizer and its position in the data, between two steps. `fresh` and `resume` make one."""

    def __init__(self, recipe: Recipe, corpus_dir: Path, execution: Execution, network: Network, steps: int) -> None:
        self.recipe = recipe
        self.execution = execution
        self.steps = steps
        self.network = network.to(execution.device)
        self.optimizer = AdamW(self.network, recipe.optimizer, unembedding_name(recipe.model))
        self._sequences = _open_sequences(recipe, corpus_dir)
        self._body = torch.compile(body(self.network)) if execution.compile else body(self.network)
        # Nothing draws random numbers yet: the state is kept so that a recipe with dropout would resume exactly too.
        self._random_state = torch.Generator().manual_seed(recipe.seed).get_state()

    @classmethod
    def fresh(cls, recipe: Recipe, corpus_dir: Path, execution: Execution) -> Self:
        """Fresh weights at 0 tokens. raises InputError if the corpus is not the recipe's"""
        return cls(recipe, corpus_dir, execution, build_model(recipe.model, recipe.seed), steps=0)

    @classmethod
    def resume(cls, checkpoint_dir: Path, recipe: Recipe, corpus_dir: Path, execution: Execution) -> Self:
        """The state of a checkpoint, to be trained on by a recipe with the same history up to there.

        raises  InputError if model, data, batch size or seed differ from the checkpoint's; that learning rates and
                optimizer settings agree so far is the caller's to know (histories). EnvironmentFault (corrupt_file)
                if a file of the checkpoint is damaged
        """
        manifest = read_manifest(checkpoint_dir)
        _check_history(manifest, recipe, checkpoint_dir)
        training = cls(recipe, corpus_dir, execution, load_network(checkpoint_dir), manifest.steps)
        state = read_state(checkpoint_dir)
        training._random_state = state.pop(RANDOM_STATE)
        training.optimizer.restore(state, manifest.steps)
        return training

    @property
    def tokens(self) -> int:
        """Position: tokens seen since fresh weights."""
        return self.steps * self.recipe.tokens_per_step

    def train_to(
        self, tokens: int, should_stop: Callable[[], bool], on_record: Callable[[CurveRecord], None]
    ) -> Ending:
        """Train until `tokens` have been seen, at most the recipe's token_budget.

        should_stop  asked before every step; when true, training ends there and may go on later
        on_record    gets every step that was applied
        returns      reached, stopped, or diverged: a loss or gradient norm that is not finite; that step is not applied
        raises       InputError if the corpus is exhausted
        """
        last = step_of(self.recipe, tokens)
        assert self.steps <= last <= self.recipe.steps, f"at step {self.steps}, {last} asked, {self.recipe.steps} exist"
        rates = learning_rates(self.recipe, self.steps + 1, last)
        with self._settings_of_this_process():
            for rate in rates.tolist():
                if should_stop():
                    return Ending(kind="stopped", tokens=self.tokens)
                record = self._step(rate)
                if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
                    return Ending(kind="diverged", tokens=self.tokens, reason=_divergence(record))
                on_record(record)
        return Ending(kind="reached", tokens=self.tokens)

    def save(self, target: Path, *, segment: str, history: str, curve: Sequence[CurveRecord]) -> CheckpointManifest:
        """Write the state as it is, before training goes on (Snapshot.write)."""
        return self._state(copied=False).write(target, segment=segment, history=history, curve=curve)

    def snapshot(self) -> Snapshot:
        """A copy of the state in the memory of the CPU, to be written while training goes on."""
        return self._state(copied=True)

    def _state(self, *, copied: bool) -> Snapshot:
        settings = self.execution
        weights = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        state = {RANDOM_STATE: self._random_state, **self.optimizer.tensors()}
        return Snapshot(
            recipe=self.recipe,
            tokens=self.tokens,
            steps=self.steps,
            weights=_copies(weights) if copied else weights,
            state=_copies(state) if copied else state,
            made=circumstances(
                device=settings.device,
                threads=settings.threads,
                micro_batch=settings.micro_batch,
                compiled=settings.compile,
            ),
            compress=settings.compress_checkpoints,
        )

    def _step(self, rate: float) -> CurveRecord:
        """One optimizer step; not applied if its loss or gradient is not finite."""
        started = time.perf_counter()
        recipe = self.recipe
        ids_BT = torch.from_numpy(self._sequences.read(self.steps * recipe.batch_size, recipe.batch_size))
        self.optimizer.zero_grad()
        loss = self._accumulate_gradients(ids_BT.to(self.execution.device))
        grad_norm = clip_grad_norm_(self.network.parameters(), recipe.optimizer.clip).item()
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.optimizer.step(rate)
            self.steps += 1
        return CurveRecord(
            step=self.steps,
            tokens=self.tokens,
            loss=loss,
            lr=rate,
            weight_decay=recipe.optimizer.weight_decay,
            grad_norm=grad_norm,
            tokens_per_s=recipe.tokens_per_step / (time.perf_counter() - started),
        )

    def _accumulate_gradients(self, ids_BT: Tensor) -> float:
        """Add up the gradient of the batch's mean loss; each part counts by its tokens, so the parts do not matter."""
        total = torch.zeros((), device=ids_BT.device)
        for part_BT in torch.split(ids_BT, self.execution.micro_batch or len(ids_BT)):
            loss = self._mean_loss(part_BT) * (len(part_BT) / len(ids_BT))
            torch.autograd.backward(loss)
            total += loss.detach()
        return total.item()

    def _mean_loss(self, ids_BT: Tensor) -> Tensor:
        """Mean loss of the tokens 2 to T of each sequence; the last token predicts nothing, so it is not read."""
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            hidden_BTD = self._body(input_ids=ids_BT[:, :-1]).last_hidden_state
            return mean_loss(hidden_BTD.flatten(0, 1), unembedding(self.network), ids_BT[:, 1:].flatten())

    @contextmanager
    def _settings_of_this_process(self) -> Iterator[None]:
        """Threads and random state are torch's globals: ours while we train, as they were before when we return."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.execution.threads)
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._random_state)
            try:
                yield
            finally:
                self._random_state = torch.get_rng_state()
                torch.set_num_threads(threads)


def _open_sequences(recipe: Recipe, corpus_dir: Path) -> TrainingSequences:
    corpus = read_corpus(corpus_dir)
    sequences = TrainingSequences(
        corpus_dir, corpus, context=recipe.model.context, seed=recipe.seed, repeat=recipe.data.repeat
    )
    problems = []
    if corpus.digest != recipe.data.digest:
        problems.append(f"data.digest: the recipe says {recipe.data.digest}, the corpus there has {corpus.digest}")
    if corpus.tokenizer.vocab_size > recipe.model.vocab_size:
        problems.append(
            f"model.vocab_size: {recipe.model.vocab_size:,}, the tokenizer of the corpus has "
            f"{corpus.tokenizer.vocab_size:,} entries"
        )
    one_pass = sequences.count * recipe.model.context
    if recipe.token_budget > one_pass and not recipe.data.repeat:
        problems.append(
            f"token_budget: {recipe.token_budget:,}, one pass over the corpus has {one_pass:,} tokens; "
            f"more needs data.repeat"
        )
    if problems:
        raise InputError(f"{corpus_dir}: not a corpus for this recipe, nothing was trained", problems)
    return sequences


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _check_history(manifest: CheckpointManifest, recipe: Recipe, checkpoint_dir: Path) -> None:
    """What has been realised at the checkpoint must be the recipe's: fresh weights always, the rest after a step."""
    before = manifest.recipe
    if before is None:
        raise InputError(f"{checkpoint_dir}: an imported model has no optimizer state, nothing was resumed")
    realised = {"model": (before.model, recipe.model), "seed": (before.seed, recipe.seed)}
    if manifest.steps > 0:
        realised["data.digest"] = (before.data.digest, recipe.data.digest)
        realised["batch_size"] = (before.batch_size, recipe.batch_size)
    problems = [f"{name}: {there} there, {here} here" for name, (there, here) in realised.items() if there != here]
    if problems:
        raise InputError(f"{checkpoint_dir}: of another training, nothing was resumed", problems)


def _divergence(record: CurveRecord) -> str:
    return f"step {record.step + 1}: loss {record.loss:g}, gradient norm {record.grad_norm:g}, lr {record.lr:.3g}"
