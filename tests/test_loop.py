"""The training loop against a plain PyTorch loop, and against itself: split, resumed, accumulated, killed."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipes import hugging_face_model
from torch.nn.utils import clip_grad_norm_

from tests.recipes import tiny_recipe
from tests.trainer_fixtures import CPU, recipe_of, save, trained
from trainers.__main__ import main
from trainers.batches import TrainingSequences
from trainers.checkpoint import CurveRecord, read_curve, read_tensor, verify_checkpoint
from trainers.config import Recipe
from trainers.errors import InputError
from trainers.loop import Execution, Training
from trainers.tokens import read_manifest as read_corpus

STEP = 256  # tokens of a step of tiny_recipe
PLAIN_PEAK = 2e-3


def plain_losses(recipe: Recipe, corpus: Path, steps: int) -> list[float]:
    """What a person would write: the Hugging Face model with labels=ids, torch's AdamW, its clipping, a cosine."""
    torch.set_num_threads(1)
    network = hugging_face_model(recipe.model, recipe.seed)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    sequences = TrainingSequences(
        corpus, read_corpus(corpus), context=recipe.model.context, seed=recipe.seed, repeat=False
    )
    losses = []
    for step in range(1, steps + 1):
        ids = torch.from_numpy(sequences.read((step - 1) * recipe.batch_size, recipe.batch_size))
        loss = network(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(network.parameters(), 1.0)
        share = (step - 4) / 28  # 4 steps of warm-up, 32 in all, down to a tenth of the peak
        cosine = PLAIN_PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        optimizer.param_groups[0]["lr"] = PLAIN_PEAK * step / 4 if step < 4 else cosine
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["olmo", "pythia"])
def test_losses_are_those_of_a_plain_loop_over_the_hugging_face_model(family: str, tied: bool, corpus: Path) -> None:
    # a small learning rate: Adam makes rounding errors of tiny gradients grow by it
    recipe = recipe_of(corpus, family=family, tied=tied, peak_lr=PLAIN_PEAK)
    curve = trained(Training.fresh(recipe, corpus, CPU), recipe.token_budget)
    assert [record.loss for record in curve] == pytest.approx(plain_losses(recipe, corpus, 32), rel=1e-5)
    assert curve[-1].loss < curve[0].loss - 0.3
    assert [record.tokens for record in curve] == list(range(STEP, 33 * STEP, STEP))


def test_training_loads_neither_the_compiler_of_torch_nor_transformers(corpus: Path, tmp_path: Path) -> None:
    """Each takes a worker longer to import than a tiny trial to train; torch loads its own behind harmless calls."""
    (tmp_path / "recipe.json").write_text(recipe_of(corpus).model_dump_json())
    script = f"""
import sys
from pathlib import Path
from trainers.config import Recipe
from trainers.loop import Execution, Training
recipe = Recipe.model_validate_json(Path({str(tmp_path / "recipe.json")!r}).read_text())
training = Training.fresh(recipe, Path({str(corpus)!r}), Execution())
training.train_to({2 * STEP}, lambda: False, lambda record: None)
training.save(Path({str(tmp_path / "checkpoint")!r}), segment="s", history="h", curve=())
Training.resume(Path({str(tmp_path / "checkpoint")!r}), recipe, Path({str(corpus)!r}), Execution())
found = {{"torch._dynamo", "sympy"}} & sys.modules.keys()
import trainers.__main__, evaluators.__main__, evaluators.evaluate
sys.exit(", ".join(found | {{"transformers"}} & sys.modules.keys()) or 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_snapshot_that_is_written_later_is_the_checkpoint_of_its_moment(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus)
    training = Training.fresh(recipe, corpus, CPU)
    trained(training, 4 * STEP)
    snapshot, at_once = training.snapshot(), save(training, tmp_path / "at-once")
    trained(training, 8 * STEP)
    later = snapshot.write(tmp_path / "later", segment="s", history="h", curve=())
    assert (later.checkpoint, later.tokens) == (at_once.checkpoint, 4 * STEP)
    verify_checkpoint(tmp_path / "later")


def test_packed_files_are_smaller_and_training_goes_on_from_them_with_the_same_bits(
    corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus)
    folders = []
    for compress in (False, True):
        execution = Execution(threads=1, compress_checkpoints=compress)
        training = Training.fresh(recipe, corpus, execution)
        trained(training, 4 * STEP)
        save(training, tmp_path / f"{compress}-4")
        resumed = Training.resume(tmp_path / f"{compress}-4", recipe, corpus, execution)
        trained(resumed, 8 * STEP)
        folders.append(tmp_path / f"{compress}-8")
        save(resumed, folders[-1])
    plain, packed = (verify_checkpoint(folder) for folder in folders)
    assert packed.checkpoint == plain.checkpoint
    assert packed.files["weights.parquet"].bytes < 0.95 * plain.files["weights.parquet"].bytes
    assert torch.equal(*(read_tensor(folder, "lm_head.weight") for folder in folders))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_parts_of_a_batch_give_the_step_of_the_whole(micro_batch: int, corpus: Path) -> None:
    recipe = recipe_of(corpus, clip=0.5)
    whole, parts = (
        Training.fresh(recipe, corpus, Execution(threads=1, micro_batch=size)) for size in (None, micro_batch)
    )
    for tokens in (STEP, 2 * STEP, 3 * STEP):
        (one,), (other,) = trained(whole, tokens), trained(parts, tokens)
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        for name, parameter in whole.network.named_parameters():
            assert parameter.grad is not None
            difference = parts.network.get_parameter(name).grad - parameter.grad
            assert difference.norm() <= 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize(("family", "split"), [("olmo", 0), ("olmo", 1), ("olmo", 7), ("olmo", 8), ("pythia", 3)])
def test_resuming_anywhere_gives_the_bits_of_training_straight_through(
    family: str, split: int, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, family=family)
    straight = Training.fresh(recipe, corpus, CPU)
    curve = trained(straight, 8 * STEP)
    first = Training.fresh(recipe, corpus, CPU)
    head = trained(first, split * STEP)
    save(first, tmp_path / "split", head)
    torch.manual_seed(99)  # whatever else draws random numbers in this process
    resumed = Training.resume(tmp_path / "split", recipe, corpus, CPU)
    tail = trained(resumed, 8 * STEP)
    assert save(resumed, tmp_path / "resumed").checkpoint == save(straight, tmp_path / "straight").checkpoint
    joined = [*read_curve(tmp_path / "split"), *tail]
    assert [(r.step, r.loss, r.grad_norm, r.lr) for r in joined] == [(r.step, r.loss, r.grad_norm, r.lr) for r in curve]


def test_two_trainings_that_take_turns_do_not_touch_each_other(corpus: Path, tmp_path: Path) -> None:
    recipes = [recipe_of(corpus, seed=seed) for seed in (0, 1)]
    alone = [Training.fresh(recipe, corpus, CPU) for recipe in recipes]
    turns = [Training.fresh(recipe, corpus, CPU) for recipe in recipes]
    for training in alone:
        trained(training, 4 * STEP)
    for tokens in range(STEP, 5 * STEP, STEP):
        for training in turns:
            trained(training, tokens)
    for number, (one, other) in enumerate(zip(alone, turns, strict=True)):
        assert save(one, tmp_path / f"a{number}").checkpoint == save(other, tmp_path / f"b{number}").checkpoint


def test_a_stop_leaves_the_state_between_two_steps_and_training_goes_on(corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus)
    straight, stopped = (Training.fresh(recipe, corpus, CPU) for _ in range(2))
    trained(straight, 6 * STEP)
    curve: list[CurveRecord] = []
    ending = stopped.train_to(6 * STEP, lambda: len(curve) == 4, curve.append)
    assert (ending.kind, ending.tokens, stopped.tokens) == ("stopped", 4 * STEP, 4 * STEP)
    trained(stopped, 6 * STEP)
    assert save(stopped, tmp_path / "a").checkpoint == save(straight, tmp_path / "b").checkpoint


def test_a_loss_that_is_not_finite_ends_as_diverged_and_its_step_is_not_applied(corpus: Path) -> None:
    training = Training.fresh(recipe_of(corpus, peak_lr=1e30, weight_decay=0.0, warmup_tokens=0), corpus, CPU)
    curve: list[CurveRecord] = []
    ending = training.train_to(32 * STEP, lambda: False, curve.append)
    assert ending.kind == "diverged"
    assert ending.tokens == training.tokens == STEP * len(curve) > 0
    assert ending.reason.startswith(f"step {len(curve) + 1}: loss ")
    assert all(math.isfinite(record.loss) for record in curve)
    assert all(parameter.isfinite().all() for parameter in training.network.parameters())


def test_bfloat16_learns_like_float32(corpus: Path) -> None:
    exact, coarse = (
        recipe_of(corpus).model_copy(update={"precision": precision}) for precision in ("float32", "bfloat16")
    )
    curves = [trained(Training.fresh(recipe, corpus, CPU), 16 * STEP) for recipe in (exact, coarse)]
    assert [r.loss for r in curves[1]] == pytest.approx([r.loss for r in curves[0]], rel=0.01)
    assert curves[1][-1].loss != curves[0][-1].loss


def test_threads_and_random_state_of_the_process_are_as_before(corpus: Path) -> None:
    torch.manual_seed(7)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    trained(Training.fresh(recipe_of(corpus), corpus, Execution(threads=2)), STEP)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_recipe_with_another_budget_goes_on_from_a_shared_start(corpus: Path, tmp_path: Path) -> None:
    flat: dict[str, Any] = {"shape": "constant", "final_fraction": 1.0}
    short, long = recipe_of(corpus, **flat), recipe_of(corpus, token_budget=64 * STEP, **flat)
    training = Training.fresh(short, corpus, CPU)
    trained(training, 8 * STEP)
    save(training, tmp_path / "8")
    branch, straight = Training.resume(tmp_path / "8", long, corpus, CPU), Training.fresh(long, corpus, CPU)
    trained(branch, 12 * STEP)
    trained(straight, 12 * STEP)
    assert save(branch, tmp_path / "branch").checkpoint == save(straight, tmp_path / "straight").checkpoint


def test_a_checkpoint_of_another_training_is_refused_with_every_difference(corpus: Path, tmp_path: Path) -> None:
    training = Training.fresh(recipe_of(corpus), corpus, CPU)
    save(training, tmp_path / "0")
    trained(training, STEP)
    save(training, tmp_path / "1")
    with pytest.raises(InputError, match=r"batch_size: 8 there, 4 here") as refused:
        Training.resume(tmp_path / "1", recipe_of(corpus, batch_size=4, seed=1), corpus, CPU)
    assert "seed: 0 there, 1 here" in str(refused.value)
    other_batch = Training.resume(tmp_path / "0", recipe_of(corpus, batch_size=4), corpus, CPU)
    assert other_batch.tokens == 0


def test_a_corpus_that_does_not_fit_the_recipe_is_refused_before_training(corpus: Path) -> None:
    with pytest.raises(InputError, match=r"data\.digest: the recipe says none, the corpus there has"):
        Training.fresh(tiny_recipe(), corpus, CPU)
    with pytest.raises(InputError, match=r"model\.vocab_size: 100, the tokenizer of the corpus has 500"):
        Training.fresh(recipe_of(corpus, vocab_size=100), corpus, CPU)
    with pytest.raises(InputError, match=r"token_budget: 25,600,000, one pass over the corpus has"):
        Training.fresh(recipe_of(corpus, token_budget=100_000 * STEP), corpus, CPU)


# --- python -m trainers ----------------------------------------------------------------------------------------------


def trial_file(tmp_path: Path, corpus: Path, checkpoints: list[int], **changes: Any) -> Path:
    path = tmp_path / "trial.yaml"
    recipe = recipe_of(corpus, **changes).model_dump()
    path.write_text(yaml.safe_dump({"corpus": str(corpus), "checkpoints": checkpoints, "recipe": recipe}))
    return path


def arguments(trial: Path, out: Path) -> list[str]:
    return [str(trial), "--out", str(out), "--threads", "1"]


def test_a_stopped_command_saves_its_state_and_the_same_command_finishes_with_the_bits_of_training_straight_through(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = 150 * STEP
    trial, out = trial_file(tmp_path, corpus, [0, 8 * STEP, budget], token_budget=budget), tmp_path / "out"
    command = [sys.executable, "-m", "trainers", *arguments(trial, out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"checkpoint {out / str(8 * STEP)}"):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "state saved; the same command again goes on from there" in rest
    saved = max(int(folder.name) for folder in out.iterdir())
    assert 8 * STEP <= saved < budget
    assert main(arguments(trial, out)) == 0
    printed = capsys.readouterr().out
    assert f"going on from {out / str(saved)}" in printed
    assert f"python -m evaluators {out / str(budget)}" in printed
    straight = Training.fresh(recipe_of(corpus, token_budget=budget), corpus, CPU)
    trained(straight, budget)
    expected, found = save(straight, tmp_path / "straight"), verify_checkpoint(out / str(budget))
    assert (found.weights_sha256, found.state_sha256) == (expected.weights_sha256, expected.state_sha256)
    assert [record.step for record in read_curve(out / str(budget))] == list(range(9, 151))


def test_a_bad_trial_file_gets_all_its_problems_at_once_and_exit_code_2(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = trial_file(tmp_path, corpus, [0])
    content = yaml.safe_load(trial.read_text())
    content["recipe"]["model"]["layers"] = 0
    content["recipe"]["batchsize"] = content["recipe"].pop("batch_size")
    trial.write_text(yaml.safe_dump(content))
    assert main(arguments(trial, tmp_path / "out")) == 2
    message = capsys.readouterr().err
    for field in ("recipe.model.layers", "recipe.batchsize", "recipe.batch_size"):
        assert field in message
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_inside_a_step_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(trial_file(tmp_path, corpus, [STEP + 1]), tmp_path / "out")) == 2
    assert "allowed: multiples of a step of 256 tokens, up to token_budget 8,192" in capsys.readouterr().err
