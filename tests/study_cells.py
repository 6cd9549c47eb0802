"""Two synthetic studies of 108 cells with known answers: 6 sizes x 18 recipes (3 batches x 3 decays x 2 budgets).

mirrored   size, tokens, batch and weight decay drive both the effective rank and the loss; neither drives the other
linked     the same, and what the recipe leaves open in the rank lowers the loss directly
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

SIZES = {"4M": 3_744_832, "8M": 8_538_240, "14M": 14_380_224, "20M": 19_101_888, "60M": 57_078_144, "90M": 97_946_640}
AXES = ("scale", "batch_size", "weight_decay", "token_budget")


def mirrored_cells(seed: int = 0) -> pd.DataFrame:
    return _cells(seed, link=0.0)


def linked_cells(seed: int = 0) -> pd.DataFrame:
    return _cells(seed, link=1.0)


def _cells(seed: int, link: float) -> pd.DataFrame:
    points = list(itertools.product(SIZES, (32, 128, 512), (0.01, 0.1, 0.5), (8 * 10**9, 32 * 10**9)))
    cells = pd.DataFrame(points, columns=list(AXES))
    cells["params_no_input_embedding"] = cells["scale"].map(SIZES)
    cells["flops"] = 6.0 * cells["params_no_input_embedding"] * cells["token_budget"]
    cells["trial"] = [f"{s}-b{b}-wd{w:g}-{t // 10**9}B" for s, b, w, t in points]
    cells["checkpoint"] = "at-the-end-of-" + cells["trial"]
    cells["state"] = "complete"
    random = np.random.default_rng(seed)
    size, tokens = (np.log(cells[name] / cells[name].min()) for name in ("params_no_input_embedding", "token_budget"))
    batch, decay = np.log(cells["batch_size"] / 32), np.log(cells["weight_decay"] / 0.01)
    own = random.normal(size=len(cells))  # the part of the rank that no setting explains
    rank = 40 + 6 * size + 3 * tokens + 4 * batch + 3 * decay + 7.0 * own
    loss = 3.9 - 0.18 * size - 0.09 * tokens - 0.03 * batch - 0.02 * decay
    cells["effective_rank"] = rank
    cells["isotropy"] = np.exp(-rank / 50)
    cells["loss_docs"] = loss + 0.1 * random.normal(size=len(cells)) - 0.1 * link * own
    cells["loss_python"] = 0.4 + 1.1 * cells["loss_docs"] + 0.01 * random.normal(size=len(cells))
    return cells
