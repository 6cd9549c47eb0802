"""A store of a synthetic study: a real sweep file and plan, made-up checkpoints, metrics and curves.

The training never happened, but what is stored has its form: size, tokens, batch and weight decay drive rank and loss,
larger batches make the loss U-shaped, the parallel layout saturates. Every number is a function of the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from store_rows import NOON, metric_row, row

from orchestrator.plan import Plan, Segment, load_plan
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.sweeps import submit

DOMAINS = ("docs", "python", "maths", "cpp", "language", "licences")
ALL_EVALUATORS = ("geometry", "loss", "hidden_geometry", "finetune", "quantize")
STEP = 2048 * 32


def study_file(*, scales: list[str], batches: list[int], checkpoints: int) -> str:
    """A full factorial over size, batch, decay and budget; learning rate and annealing; OLMo against Pythia."""
    fractions = [0.0, *np.linspace(0.1, 1, checkpoints - 1).round(4).tolist()]
    content = {
        "name": "study",
        "question": "does the effective rank of the unembedding predict the loss, or does it mirror the recipe?",
        "base": {"preset": "ladder", "corpus": "pile", "scale": scales[0], "batch_size": batches[0], "seed": 0}
        | {"token_budget": 512 * STEP, "schedule": {"shape": "cosine", "warmup_tokens": 0}},
        "grids": [
            {
                "name": "recipe",
                "axes": {
                    "scale": scales,
                    "batch_size": batches,
                    "weight_decay": [0.01, 0.1, 0.5],
                    "token_budget": [512 * STEP, 2048 * STEP],
                },
            },
            {"name": "rate", "axes": {"scale": scales[:2], "learning_rate_multiplier": [0.1, 1, 10]}},
            {"name": "annealing", "axes": {"scale": scales[:2], "schedule.final_fraction": [0, 0.01, 0.1]}},
            {
                "name": "layout",
                "axes": {"family, scale, attention": [["olmo", "14M", "sequential"], ["pythia", "14M", "parallel"]]},
            },
        ],
        "checkpoints": {"at_fractions": fractions},
        "evaluations": [{"evaluator": "geometry"}, {"evaluator": "loss", "suite": "builtin"}],
    }
    return yaml.safe_dump(content, sort_keys=False)


def make_study_store(
    root: Path,
    *,
    scales: tuple[str, ...] = ("4M", "14M", "60M"),
    batches: tuple[int, ...] = (32, 128),
    checkpoints: int = 3,
    evaluators: tuple[str, ...] = ("geometry", "loss"),
    finished: int | None = None,
    diverged: tuple[int, ...] = (),
) -> StoreLayout:
    """Make the store.

    finished   only this many trials have trained at all
    diverged   positions of trials whose second segment diverged
    """
    text = study_file(scales=list(scales), batches=list(batches), checkpoints=checkpoints)
    _, plan = load_plan(text, "study.yaml", {})
    layout = create_or_open(root)
    submit(layout, text, plan)
    lost = [segment for place in diverged for segment in plan.trials[place].chain[1:]]
    trials = plan.trials if finished is None else plan.trials[:finished]
    wanted = dict.fromkeys(segment for trial in trials for segment in trial.chain if segment not in lost)
    for id in wanted:
        _publish_segment(layout, plan, plan.segment_by_id[id], evaluators)
    for place in diverged:
        _publish_divergence(layout, plan.segment_by_id[plan.trials[place].chain[1]])
    return layout


def _publish_segment(layout: StoreLayout, plan: Plan, segment: Segment, evaluators: tuple[str, ...]) -> None:
    about = {"segment": segment.id, "tokens": segment.to_tokens}
    checkpoint = hashlib.sha256(segment.id.encode()).hexdigest()
    versions = json.dumps({"torch": "2.13.0", "transformers": "5.24.0"})
    made = {"code_revision": "0123abc", "versions": versions, "steps": segment.to_tokens // STEP}
    publish(layout, "checkpoints", [row("checkpoints", checkpoint=checkpoint, **about, **made)])
    ended = {"from_tokens": segment.from_tokens, "to_tokens": segment.to_tokens, "parent": segment.parent}
    where = {"device": "cpu", "threads": 1, "host": "host-1", "time": NOON, "attempt": 1, "wall_s": 12.0}
    publish(layout, "segments", [row("segments", segment=segment.id, state="committed", **ended, **where)])
    measured = _values(segment)
    asked = {(e.evaluator, e.segment): e for e in plan.evaluations}
    for evaluator in evaluators:
        request = asked.get((evaluator, segment.id))
        settings = request.settings_digest if request else f"settings-{evaluator}"
        source = {"evaluator": evaluator, "settings_digest": settings, "evaluator_version": 1}
        rows = [
            metric_row(checkpoint, **{"convention": "{}"} | about | source | value) for value in measured[evaluator]
        ]
        publish(layout, "metrics", rows)


def _publish_divergence(layout: StoreLayout, segment: Segment) -> None:
    ended = {"from_tokens": segment.from_tokens, "to_tokens": segment.to_tokens, "parent": segment.parent}
    reason = "the loss is nan"
    at = {"diverged_at_tokens": segment.from_tokens + STEP, "reason": reason, "attempt": 1, "time": NOON}
    publish(layout, "segments", [row("segments", segment=segment.id, state="diverged", **ended, **at)])


def _values(segment: Segment) -> dict[str, list[dict[str, Any]]]:
    """evaluator -> metric, value, unit, dataset, ... of each of its rows."""
    random = np.random.default_rng(int(hashlib.sha256(segment.id.encode()).hexdigest()[:8], 16))
    recipe, done = segment.recipe, segment.to_tokens / segment.recipe.token_budget
    width = recipe.model.hidden_size
    size, tokens = np.log(width / 64), np.log(recipe.token_budget / (512 * STEP))
    batch, decay = np.log(recipe.batch_size / 32), np.log(recipe.optimizer.weight_decay / 0.01)
    falls = 0.25 * done**3 if recipe.model.attention == "parallel" else 0.0
    share = 0.45 + 0.04 * batch + 0.03 * decay - 0.02 * tokens + 0.12 * (1 - done) - falls + 0.02 * random.normal()
    rank = width * float(np.clip(share, 0.05, 0.98))
    final = 3.9 - 0.3 * size - 0.1 * tokens + 0.04 * (batch - 1.2) ** 2 - 0.02 * decay + falls
    loss = final + (10.8 - final) * float(np.exp(-9 * done)) + 0.02 * random.normal()
    return {
        "geometry": list(_geometry(rank, width, random)),
        "hidden_geometry": [{**v, "metric": f"hidden_{v['metric']}"} for v in _geometry(0.6 * rank, width, random)],
        "loss": list(_losses(loss, random)),
        "finetune": [
            {"metric": name, "value": value, "unit": "nats/token", "dataset": target}
            for target in ("python", "maths")
            for name, value in (("finetuned_loss", 0.8 * loss), ("forgetting", 0.1 + 0.02 * random.normal()))
        ],
        "quantize": [
            {"metric": f"gptq_loss_increase_{bits}bit", "value": value, "unit": "nats/token", "dataset": "docs"}
            for bits, value in ((3, 0.3 - 0.002 * rank), (4, 0.05 + 0.005 * random.normal()))
        ],
    }


def _geometry(rank: float, width: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    noise = 1 + 0.03 * random.normal(size=6)
    for metric, value, unit in (
        ("effective_rank", rank, "directions"),
        ("effective_rank_share", rank / width, "1"),
        ("singular_entropy", float(np.log(width / rank)), "nats"),
        ("participation_ratio", 0.4 * rank * noise[0], "directions"),
        ("stable_rank", 0.1 * rank * noise[1], "directions"),
        ("isotropy", float(np.exp(-30 / rank)) * noise[2], "1"),
        ("average_cosine", 8 / rank * noise[3], "1"),
        ("isoscore", rank / width * noise[4], "1"),
    ):
        yield {"metric": metric, "value": float(value), "unit": unit}


def _losses(loss: float, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    for place, domain in enumerate(DOMAINS):
        value = loss * (1 + 0.08 * place) + 0.03 * random.normal() * bool(place)
        convention = json.dumps({"in_distribution": domain == "docs"})
        common = {"dataset": domain, "split": "heldout", "n": 8128, "convention": convention}
        yield {"metric": "loss", "value": value, "unit": "nats/token", **common}
        yield {"metric": "bits_per_byte", "value": value / 3.1, "unit": "bits/byte", **common}
