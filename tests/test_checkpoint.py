"""Checkpoint folders: equal bits, equal digest; whole or absent; every kind of damage named."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import torch
from recipes import hugging_face_model
from torch import Tensor

from tests.recipes import tiny_recipe
from trainers.checkpoint import (
    CHUNK_BYTES,
    CheckpointManifest,
    CurveRecord,
    circumstances,
    content_sha256,
    load_model,
    read_curve,
    read_manifest,
    read_state,
    read_tensor,
    read_weights,
    verify_checkpoint,
    write_checkpoint,
)
from trainers.errors import EnvironmentFault, InputError
from trainers.model import build_model

FILES = ("weights.parquet", "state.parquet", "curve.parquet", "manifest.json")
CURVE = [
    CurveRecord(step=s, tokens=256 * s, loss=6.0 / s, lr=1e-3, weight_decay=0.1, grad_norm=1.5, tokens_per_s=1e4 / s)
    for s in (1, 2, 3)
]


def write(
    target: Path, *, seed: int = 0, threads: int = 1, curve: list[CurveRecord] = CURVE, **changes: Any
) -> CheckpointManifest:
    recipe = tiny_recipe(**changes)
    weights = dict(build_model(recipe.model, seed).named_parameters())
    return write_checkpoint(
        target,
        weights=weights,
        state={"random_state": torch.get_rng_state(), **{f"{n}/exp_avg": p * 0.5 for n, p in weights.items()}},
        curve=curve,
        recipe=recipe,
        segment="olmo-tiny-32-1",
        history="abc",
        tokens=768,
        steps=3,
        made=circumstances(device="cpu", threads=threads, micro_batch=None, compiled=False),
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "768"
    write(folder)
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "768"))


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_everything_comes_back_as_it_was_written(pristine: Path) -> None:
    recipe = tiny_recipe()
    weights = dict(build_model(recipe.model, 0).named_parameters())
    back = read_weights(pristine)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert torch.equal(read_state(pristine)["lm_head.weight/exp_avg"], weights["lm_head.weight"] * 0.5)
    assert list(read_curve(pristine)) == CURVE
    manifest = read_manifest(pristine)
    assert (manifest.recipe, manifest.tokens, manifest.steps) == (recipe, 768, 3)
    assert verify_checkpoint(pristine) == manifest


def test_a_loaded_model_gives_the_logits_of_the_saved_one(tmp_path: Path) -> None:
    for family, tied in (("olmo", True), ("pythia", False)):
        write(tmp_path / family, family=family, tied=tied, seed=5)
        ids = torch.arange(20)[None]
        saved = hugging_face_model(tiny_recipe(family=family, tied=tied).model, 5)
        assert torch.equal(load_model(tmp_path / family)(input_ids=ids).logits, saved(input_ids=ids).logits)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.arange(10).reshape(2, 5).T,
        torch.arange(CHUNK_BYTES // 4 * 2 + 3, dtype=torch.float32),
    ],
    ids=["scalar", "empty", "bfloat16", "not contiguous", "several chunks"],
)
def test_a_tensor_of_any_kind_comes_back(tensor: Tensor, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    weights = dict(build_model(recipe.model, 0).named_parameters())
    made = circumstances(device="cpu", threads=1, micro_batch=None, compiled=False)
    write_checkpoint(
        tmp_path / "0", weights=weights, state={"x": tensor}, curve=[], recipe=recipe, segment="s", history="h",
        tokens=0, steps=0, made=made,
    )  # fmt: skip
    back = read_state(tmp_path / "0")["x"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_equal_bits_have_equal_digests_whatever_the_circumstances(tmp_path: Path) -> None:
    first, again = write(tmp_path / "a"), write(tmp_path / "b", threads=2, curve=[])
    assert (first.checkpoint, first.unembedding_sha256) == (again.checkpoint, again.unembedding_sha256)
    assert write(tmp_path / "c", seed=1).checkpoint != first.checkpoint


def test_a_content_digest_sees_name_type_shape_and_every_bit() -> None:
    zeros = torch.zeros(4)
    others: list[dict[str, Tensor]] = [
        {"b": zeros},
        {"a": zeros.view(torch.int32)},
        {"a": zeros.reshape(2, 2)},
        {"a": -zeros},
        {"a": zeros, "b": torch.empty(0)},
    ]
    assert len({content_sha256(tensors) for tensors in [{"a": zeros}, *others]}) == 6


def test_writing_the_same_again_changes_nothing_and_another_is_refused_by_both_names(checkpoint: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    there = read_manifest(checkpoint)
    assert write(checkpoint, curve=[]) == there
    with pytest.raises(InputError) as refused:
        write(checkpoint, seed=1)
    assert there.checkpoint in str(refused.value)
    assert write(checkpoint.parent / "other", seed=1).checkpoint in str(refused.value)
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["768", "other"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses every byte beyond: what a full disk does, for this process only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1000, 150_000])
def test_a_write_that_the_disk_refuses_leaves_nothing_and_says_so(size: int, tmp_path: Path) -> None:
    with largest_file(size), pytest.raises(EnvironmentFault, match="this checkpoint was not written") as fault:
        write(tmp_path / "768")
    assert fault.value.kind == "storage_error"
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "768")
    verify_checkpoint(tmp_path / "768")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("position", [0, 200, 0.3, 0.7, -9, -1])
def test_one_flipped_bit_anywhere_is_found_and_the_file_named(name: str, position: float, checkpoint: Path) -> None:
    path = checkpoint / name
    size = path.stat().st_size
    flip_bit(path, int(position * size) if 0 < position < 1 else int(position) % size)
    with pytest.raises(EnvironmentFault, match=f"{checkpoint}/{name}: ") as fault:
        verify_checkpoint(checkpoint)
    assert fault.value.kind == "corrupt_file"
    assert "restore it from a copy" in str(fault.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(name: str, share: float, checkpoint: Path) -> None:
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(EnvironmentFault, match=f"{checkpoint}/{name}: "):
        verify_checkpoint(checkpoint)
    if name == "weights.parquet":
        with pytest.raises(EnvironmentFault, match=f"{checkpoint}/{name}: "):
            load_model(checkpoint)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(EnvironmentFault, match=f"{checkpoint}/{name}: the file is missing"):
        verify_checkpoint(checkpoint)


def place_of(path: Path, tensor: str) -> int:
    """Somewhere in the middle of a tensor's bytes in the file."""
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    column = next(group.column(5) for group in groups if group.column(0).statistics.min == tensor)
    assert isinstance(column.data_page_offset, int)
    return column.data_page_offset + column.total_compressed_size // 2


def test_one_tensor_is_read_without_the_rest(checkpoint: Path) -> None:
    path = checkpoint / "weights.parquet"
    whole = read_weights(checkpoint)["lm_head.weight"]
    flip_bit(path, place_of(path, "model.embed_tokens.weight"))
    assert torch.equal(read_tensor(checkpoint, "lm_head.weight"), whole)
    with pytest.raises(EnvironmentFault, match="CRC"):
        read_tensor(checkpoint, "model.embed_tokens.weight")


def test_an_unknown_tensor_is_refused_with_the_names_there_are(pristine: Path) -> None:
    with pytest.raises(InputError, match=r"no tensor 'lm_head'[\s\S]*lm_head\.weight"):
        read_tensor(pristine, "lm_head")


def test_a_folder_without_manifest_is_not_a_checkpoint_and_those_in_it_are_named(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=f"not a checkpoint[\\s\\S]*{checkpoint}"):
        read_manifest(checkpoint.parent)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"not a checkpoint, it has no manifest\.json"):
        read_weights(checkpoint)


def test_a_newer_format_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2, "new_field": 0}))
    with pytest.raises(InputError, match="its format 2 is newer than 1"):
        read_manifest(checkpoint)


def test_duckdb_opens_the_weights_without_us(pristine: Path) -> None:
    query = f"select name, any_value(shape), sum(nbytes) from '{pristine}/weights.parquet' group by 1"
    found = {name: (shape, size) for name, shape, size in duckdb.sql(query).fetchall()}
    weights = read_weights(pristine)
    assert found == {name: (list(t.shape), t.numel() * 4) for name, t in weights.items()}


def test_reading_a_manifest_and_a_curve_loads_no_torch(pristine: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from trainers.checkpoint import read_curve, read_manifest; "
        "folder = Path(sys.argv[1]); read_manifest(folder); read_curve(folder); "
        "sys.exit(', '.join({'torch', 'transformers', 'ray'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", script, str(pristine)], check=True)
