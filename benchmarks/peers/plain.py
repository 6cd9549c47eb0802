"""The loop that one writes by hand over a Hugging Face model: python -m benchmarks.peers.plain RECIPE CORPUS STEPS
THREADS DEVICE."""

from __future__ import annotations

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  counted with the imports
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers.common import Clock, adamw, arguments, hugging_face_model, peak_mib, report, sequences_of


def main() -> None:
    given = arguments()
    recipe, settings = given.recipe, given.recipe.optimizer
    torch.set_num_threads(given.threads)
    sequences = sequences_of(recipe, given.corpus)
    before = peak_mib()
    model = hugging_face_model(recipe).to(given.device)
    optimizer = adamw(model, recipe, recipe.schedule.peak_lr)
    clock = Clock()
    for step in range(given.steps):
        ids = torch.from_numpy(sequences.read(step * recipe.batch_size, recipe.batch_size)).to(given.device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(loss.item())
        clock.tick()
    report(given, clock, before)


if __name__ == "__main__":
    main()
