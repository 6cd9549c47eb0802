"""litgpt's pre-training loop on the same recipe: python -m benchmarks.peers.litgpt_loop RECIPE CORPUS STEPS THREADS
DEVICE.

Its GPT class with the trial's fresh weights, its chunked loss, and the body of litgpt.pretrain.fit without logging:
Lightning Fabric's backward and clipping, torch's fused AdamW. Needs `pip install litgpt`.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy

from benchmarks.peers.common import Clock, adamw, arguments, peak_mib, report, sequences_of
from trainers.config import Recipe
from trainers.model import build_model


def litgpt_model(recipe: Recipe) -> Any:
    """Llama as litgpt writes it."""
    model = recipe.model
    config = Config(
        name="recipe",
        block_size=model.context,
        n_layer=model.layers,
        n_head=model.heads,
        n_embd=model.hidden_size,
        intermediate_size=model.mlp_size,
        padded_vocab_size=model.vocab_rows,
        rotary_percentage=model.rotary_fraction,
        rope_base=int(model.rotary_theta),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=model.norm_eps,
        mlp_class_name="LLaMAMLP",
    )
    weights: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, weights, dict(build_model(model, recipe.seed).state_dict()))
    network = GPT(config)
    network.load_state_dict(weights)
    return network


def main() -> None:
    given = arguments()
    recipe, settings = given.recipe, given.recipe.optimizer
    torch.set_num_threads(given.threads)
    precision = "bf16-mixed" if recipe.precision == "bfloat16" else "32-true"
    fabric = Fabric(accelerator="cpu" if given.device == "cpu" else "cuda", devices=1, precision=precision)
    sequences = sequences_of(recipe, given.corpus)
    before = peak_mib()
    plain = litgpt_model(recipe)
    optimizer = adamw(plain, recipe, recipe.schedule.peak_lr)
    model, wrapped = fabric.setup(plain, optimizer)
    clock = Clock()
    for step in range(given.steps):
        ids = torch.from_numpy(sequences.read(step * recipe.batch_size, recipe.batch_size)).to(fabric.device)
        loss = chunked_cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, wrapped, max_norm=settings.clip)
        wrapped.step()
        wrapped.zero_grad()
        clock.losses.append(loss.item())
        clock.tick()
    report(given, clock, before)


if __name__ == "__main__":
    main()
