"""transformers' Trainer on the same recipe: python -m benchmarks.peers.trainer RECIPE CORPUS STEPS THREADS DEVICE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  counted with the imports
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.common import Clock, arguments, hugging_face_model, peak_mib, report, sequences_of
from trainers.batches import TrainingSequences


class InOrder(IterableDataset[dict[str, torch.Tensor]]):
    """The trial's training sequences, one after the other."""

    def __init__(self, sequences: TrainingSequences) -> None:
        self._sequences = sequences

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self._sequences.count):
            ids = torch.from_numpy(self._sequences.read(number, 1)[0])
            yield {"input_ids": ids, "labels": ids}


class Ticks(TrainerCallback):  # type: ignore[misc]
    """Tells the clock when each step ended, and its loss as the Trainer logs it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.tick()

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self._clock.losses.append(float(logs["loss"]))


def main() -> None:
    given = arguments()
    recipe, settings = given.recipe, given.recipe.optimizer
    torch.set_num_threads(given.threads)
    sequences = sequences_of(recipe, given.corpus)
    before = peak_mib()
    clock = Clock()
    trainer = Trainer(
        model=hugging_face_model(recipe),
        args=TrainingArguments(
            output_dir="trainer",
            use_cpu=given.device == "cpu",
            bf16=recipe.precision == "bfloat16",
            per_device_train_batch_size=recipe.batch_size,
            max_steps=given.steps,
            optim="adamw_torch_fused",
            learning_rate=recipe.schedule.peak_lr,
            lr_scheduler_type="constant",
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_epsilon=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.clip,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=InOrder(sequences),
        callbacks=[Ticks(clock)],
    )
    trainer.train()
    report(given, clock, before)


if __name__ == "__main__":
    main()
