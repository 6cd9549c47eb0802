"""One checkpoint folder: written whole, verified, read back, or one tensor of it alone.

loop -> [checkpoint] -> the next segment, evaluators, store
in    named tensors, the curve since the checkpoint before, and what they belong to
out   weights.parquet, state.parquet (optimizer moments, random state), curve.parquet, and manifest.json, written last;
      of an imported model no state, and its tokenizer beside the weights.
      The folder is made beside its place and renamed: it is there with its manifest, or not at all
not   torch, as long as no tensor is touched: planner and store read manifests and curves through this module

A tensor file has one row group per tensor and one row per chunk of it, so one tensor is read without the rest, and any
Parquet reader can look inside. Pages carry a CRC, which is checked whenever they are read (pyarrow's default: unread).
Position and recipe stand in the metadata of the file too, so a file that was torn from its folder is not nameless.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import AwareDatetime, ValidationError, model_validator

from trainers.config import Count, Data, Frozen, Imported, Model, PositiveInt, Recipe
from trainers.errors import EnvironmentFault, InputError
from trainers.scales import ParameterCounts, count_parameters

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from trainers.model import Network

FORMAT_VERSION = 1
CHUNK_BYTES = 4 * 2**20
MANIFEST, WEIGHTS, STATE, CURVE = "manifest.json", "weights.parquet", "state.parquet", "curve.parquet"
TOKENIZER = "tokenizer.json"  # of an imported model; those of our own belong to their corpus
AGAIN = "restore it from a copy, or remove the folder: training then goes on from the checkpoint before it"

_TENSOR_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("data", pa.large_binary()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRecord:
    """One step of training.

    step, tokens    after it; loss   nats a token, before it; lr, weight_decay   used by it
    grad_norm       global norm before clipping; tokens_per_s   of this step alone, by the wall clock
    """

    step: int
    tokens: int
    loss: float
    lr: float
    weight_decay: float
    grad_norm: float
    tokens_per_s: float


class FileRecord(Frozen):
    """One file of the folder. sha256: hex, of its content; bytes: its size."""

    sha256: str
    bytes: Count


class Circumstances(Frozen):
    """Where and how a checkpoint was made; nothing of it is meant to change a number.

    code_revision   `git describe` of a checkout, else the version of the installed package
    micro_batch     sequences a forward pass, None for the whole batch; compiled   whether by torch.compile
    """

    code_revision: str
    versions: dict[str, str]
    host: str
    device: str
    threads: PositiveInt
    micro_batch: PositiveInt | None
    compiled: bool
    time: AwareDatetime


class CheckpointManifest(Frozen):
    """What a checkpoint folder holds.

    checkpoint        sha256 over history, tokens, weights_sha256, state_sha256: equal bits have equal digests
    segment           the segment that ended here; history   digest of all that was realised up to here
    tokens, steps     seen since fresh weights
    recipe            of the attempt that made it; another recipe with the same history may go on from here
    imported          instead of a recipe, of a model that was trained elsewhere
    weights_sha256    of names, types, shapes and bytes, whatever the file looks like; state_sha256 likewise
    unembedding       name of W among the weights; of the input embedding when tied
    """

    format: PositiveInt
    checkpoint: str
    segment: str
    history: str
    tokens: Count
    steps: Count
    recipe: Recipe | None
    imported: Imported | None = None
    files: dict[str, FileRecord]
    weights_sha256: str
    state_sha256: str
    unembedding: str
    unembedding_sha256: str
    tied: bool
    dtype: str
    parameters: ParameterCounts
    made: Circumstances

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.recipe is None) == (self.imported is None):
            raise ValueError("a checkpoint has either a recipe or is imported")
        return self

    @property
    def network(self) -> Model | Imported:
        """What the weights are weights of; both kinds have context, vocab_size and vocab_rows."""
        if self.recipe is not None:
            return self.recipe.model
        assert self.imported is not None
        return self.imported

    @property
    def trained_on(self) -> Data | Imported:
        """The training data, or the model whose training data we do not know."""
        if self.recipe is not None:
            return self.recipe.data
        assert self.imported is not None
        return self.imported


# --- writing ---------------------------------------------------------------------------------------------------------


def write_checkpoint(
    target: Path,
    *,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    curve: Sequence[CurveRecord],
    recipe: Recipe,
    segment: str,
    history: str,
    tokens: int,
    steps: int,
    made: Circumstances,
    temporary: Path | None = None,
    compress: bool = False,
) -> CheckpointManifest:
    """Put a checkpoint where it belongs, whole and on the disk when this returns.

    target     the folder to be; parents are made
    temporary  a folder that does not exist yet, on the same file system; None for a hidden one beside the target
    compress   whether the tensors' bytes are split by their place in a number and packed with zstd; the digests of the
               checkpoint are those of the tensors, so they are the same
    returns    the manifest that lies in the folder; an equal checkpoint that is there already stays as it is
    raises     InputError if another checkpoint is there; EnvironmentFault (storage_error) if the disk is full or
               read-only: then nothing of this checkpoint is left
    """
    # W is named by the model's code, which needs torch; whoever holds tensors has loaded it already
    from trainers.model import unembedding_name

    position = {"tokens": tokens, "steps": steps, "history": history, "recipe": recipe.model_dump(mode="json")}
    with _new_folder(target, temporary) as folder:
        _write_tensors(folder / WEIGHTS, weights, position, compress)
        _write_tensors(folder / STATE, state, position, compress)
        _write_curve(folder / CURVE, curve)
        manifest = _manifest(
            weights,
            unembedding_name(recipe.model),
            files={name: _synced(folder / name) for name in (WEIGHTS, STATE, CURVE)},
            state_sha256=content_sha256(state),
            segment=segment,
            history=history,
            tokens=tokens,
            steps=steps,
            recipe=recipe,
            tied=recipe.model.tied,
            parameters=count_parameters(recipe.model),
            made=made,
        )
        return _finish(folder, target, manifest)


def write_imported(
    target: Path,
    *,
    weights: Mapping[str, torch.Tensor],
    imported: Imported,
    unembedding: str,
    tied: bool,
    parameters: ParameterCounts,
    tokenizer: str | None,
    segment: str,
    tokens: int,
    steps: int,
    made: Circumstances,
    temporary: Path | None = None,
) -> CheckpointManifest:
    """Put a model that was trained elsewhere where a checkpoint belongs; it has no optimizer state and no curve.

    weights     every parameter under its name, in the type it came in;  unembedding   which of them is W
    tokenizer   the text of its tokenizer.json
    otherwise   as write_checkpoint
    """
    # How it came about is not known: equal weights of an equal model are equal, wherever they were read from.
    known = imported.model_dump(mode="json", exclude={"source", "revision"})
    history = _json_sha256({"imported": known, "weights_sha256": content_sha256(weights)})
    position = {"tokens": tokens, "steps": steps, "history": history, "imported": imported.model_dump(mode="json")}
    with _new_folder(target, temporary) as folder:
        _write_tensors(folder / WEIGHTS, weights, position)
        _write_curve(folder / CURVE, ())
        names = [WEIGHTS, CURVE]
        if tokenizer is not None:
            (folder / TOKENIZER).write_text(tokenizer, encoding="utf-8")
            names.append(TOKENIZER)
        manifest = _manifest(
            weights,
            unembedding,
            files={name: _synced(folder / name) for name in names},
            state_sha256=content_sha256({}),
            segment=segment,
            history=history,
            tokens=tokens,
            steps=steps,
            recipe=None,
            imported=imported,
            tied=tied,
            parameters=parameters,
            made=made,
        )
        return _finish(folder, target, manifest)


def _manifest(weights: Mapping[str, torch.Tensor], unembedding: str, **more: Any) -> CheckpointManifest:
    weights_sha256 = content_sha256(weights)
    identity = {
        **{name: more[name] for name in ("history", "tokens", "state_sha256")},
        "weights_sha256": weights_sha256,
    }
    return CheckpointManifest(
        **more,
        format=FORMAT_VERSION,
        checkpoint=_json_sha256(identity),
        weights_sha256=weights_sha256,
        unembedding=unembedding,
        unembedding_sha256=content_sha256({unembedding: weights[unembedding]}),
        dtype=_dtype_name(weights[unembedding]),
    )


@contextmanager
def _new_folder(target: Path, temporary: Path | None) -> Iterator[Path]:
    """A folder to fill and publish; gone at the end, whatever happens, unless it was published."""
    folder = temporary or target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    with _storage_faults(target, folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder


def _finish(folder: Path, target: Path, manifest: CheckpointManifest) -> CheckpointManifest:
    (folder / MANIFEST).write_text(_manifest_text(manifest), encoding="utf-8")
    _synced(folder / MANIFEST)
    return _publish(folder, target, manifest)


def circumstances(*, device: str, threads: int, micro_batch: int | None, compiled: bool) -> Circumstances:
    """What a checkpoint made here and now records about its making."""
    return Circumstances(
        code_revision=_code_revision(),
        versions=_versions(),
        host=socket.gethostname(),
        device=device,
        threads=threads,
        micro_batch=micro_batch,
        compiled=compiled,
        time=datetime.now(UTC),
    )


def content_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) over name, dtype, shape and bytes of each tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, _dtype_name(tensor), list(tensor.shape)]).encode())
        digest.update(_bytes_of(tensor).data)
    return digest.hexdigest()


def _write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], position: Mapping[str, Any], compress: bool = False
) -> None:
    notes = {"format": FORMAT_VERSION, "byte_split": compress, **position}
    schema = _TENSOR_SCHEMA.with_metadata({"geosweep": json.dumps(notes)})
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd" if compress else "none",
        use_dictionary=["name", "dtype"],
        write_statistics=["name"],
        write_page_checksum=True,
        write_batch_size=1,  # one page per chunk: no page comes near Parquet's limit of 2 GiB
    ) as writer:
        for name in sorted(tensors):
            rows = _tensor_rows(name, tensors[name], schema, compress)
            writer.write_table(rows, row_group_size=len(rows))


def _tensor_rows(name: str, tensor: torch.Tensor, schema: Any, byte_split: bool) -> Any:
    """One row per chunk; the bytes are not copied, unless they are split."""
    content = _split_bytes(_bytes_of(tensor), tensor.element_size()) if byte_split else _bytes_of(tensor)
    rows = max(1, -(-content.nbytes // CHUNK_BYTES))
    bounds = np.minimum(np.arange(rows + 1, dtype=np.int64) * CHUNK_BYTES, content.nbytes)
    data = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(bounds), pa.py_buffer(content.data)]
    )
    columns = {
        "name": [name] * rows,
        "dtype": [_dtype_name(tensor)] * rows,
        "shape": [list(tensor.shape)] * rows,
        "offset": bounds[:-1],
        "nbytes": np.diff(bounds),
        "data": data,
    }
    return pa.table(columns, schema=schema)


def _split_bytes(content: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Of each chunk the first bytes of its numbers, then the second, ...: zstd finds the exponents alike."""
    split = np.empty_like(content)
    for chunk in range(0, len(content), CHUNK_BYTES):
        numbers = content[chunk : chunk + CHUNK_BYTES].reshape(-1, size)
        split[chunk : chunk + CHUNK_BYTES].reshape(size, -1)[:] = numbers.T
    return split


def _write_curve(path: Path, curve: Sequence[CurveRecord]) -> None:
    names = {field.name: int if field.type == "int" else float for field in fields(CurveRecord)}
    schema = pa.schema([(name, pa.int64() if kind is int else pa.float64()) for name, kind in names.items()])
    encodings = {n: "DELTA_BINARY_PACKED" if kind is int else "BYTE_STREAM_SPLIT" for n, kind in names.items()}
    pq.write_table(
        pa.Table.from_pylist([asdict(record) for record in curve], schema=schema),
        path,
        compression="zstd",
        use_dictionary=False,
        column_encoding=encodings,
        write_page_checksum=True,
    )


def _publish(folder: Path, target: Path, manifest: CheckpointManifest) -> CheckpointManifest:
    """Give the finished folder its name. raises InputError if the name is taken by another checkpoint"""
    _sync(folder)
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        there = read_manifest(target)
        if there.checkpoint != manifest.checkpoint:
            raise other_checkpoint(str(target), there, manifest) from None
        manifest = there
    _sync(target.parent)
    return manifest


def other_checkpoint(target: str, there: CheckpointManifest, new: CheckpointManifest) -> InputError:
    """What to raise where a checkpoint belongs and another one is."""
    return InputError(
        f"{target}: another checkpoint is there; nothing was written",
        [
            f"there: {there.checkpoint} of {there.made.time:%Y-%m-%d %H:%M} on {there.made.host}",
            f"new:   {new.checkpoint}",
        ],
        "a checkpoint is never replaced: remove the folder if it is the wrong one",
    )


@contextmanager
def _storage_faults(target: Path, folder: Path) -> Iterator[None]:
    """Name what the file system refused, and leave nothing of an unfinished or superfluous folder behind."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(
            "storage_error",
            f"{target}: {error.strerror or error}; this checkpoint was not written, the ones before it are whole",
            "free space or get the permission, then give the same command again",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _manifest_text(manifest: CheckpointManifest) -> str:
    content = manifest.model_dump(mode="json")
    return json.dumps({**content, "manifest_sha256": _json_sha256(content)}, indent=1)


def _synced(path: Path) -> FileRecord:
    _sync(path)
    return _file_record(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _code_revision() -> str:
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
        )
        if described.returncode == 0:
            return described.stdout.strip()
    return _version("geosweep")


@cache
def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "numpy", "pyarrow", "geosweep")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint folder.

    raises   InputError if there is none or its format is newer; EnvironmentFault (corrupt_file) if it is damaged
    """
    path = folder / MANIFEST
    if not path.exists():
        raise InputError(f"{folder}: not a checkpoint, it has no {MANIFEST}", next_step=_checkpoints_near(folder))
    with _damage_is_named(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] > FORMAT_VERSION:
            raise InputError(
                f"{path}: its format {content['format']} is newer than {FORMAT_VERSION}, the newest known here",
                next_step="use the geosweep version that made it, or a newer one",
            )
        if content.pop("manifest_sha256") != (found := _json_sha256(content)):
            raise _corrupt(path, f"its content has sha256 {found}, another than it says itself")
        return CheckpointManifest.model_validate_json(json.dumps(content))


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One tensor of the weights, on the CPU; nothing else of the file is read but its table of contents.

    raises   InputError if there is no such tensor; EnvironmentFault (corrupt_file) if its pages are damaged
    """
    path = folder / WEIGHTS
    with _damage_is_named(path), _open_parquet(path) as file:
        groups = _row_groups(file)
        if name not in groups:
            raise InputError(f"{path}: no tensor '{name}'", [f"there are: {', '.join(groups)}"])
        return _tensor_of(file.read_row_group(groups[name]), _is_byte_split(file))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter under its name; compared with the manifest's digest, bit for bit."""
    return _read_tensors(folder, WEIGHTS, read_manifest(folder).weights_sha256)


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """The optimizer's moments and the random state (loop.py names them); compared with the manifest's digest."""
    return _read_tensors(folder, STATE, read_manifest(folder).state_sha256)


def read_curve(folder: Path) -> tuple[CurveRecord, ...]:
    """The steps since the checkpoint before this one."""
    path = folder / CURVE
    with _damage_is_named(path), _open_parquet(path) as file:
        return tuple(CurveRecord(**row) for row in file.read().to_pylist())


def load_network(folder: Path) -> Network:
    """The checkpoint's network with its weights, float32 on the CPU: our own blocks, or an imported model's class."""
    from trainers.model import empty_model

    origin = read_manifest(folder).network
    if isinstance(origin, Imported):
        return load_model(folder)
    network = empty_model(origin)
    _fill(network, folder)
    return network


def load_model(folder: Path) -> PreTrainedModel:
    """The checkpoint's model as a class of transformers, float32 on the CPU: to save, to export, to quantise."""
    from trainers.hugging_face import empty_hugging_face_model

    network = empty_hugging_face_model(read_manifest(folder).network)
    _fill(network, folder)
    return network


def _fill(network: torch.nn.Module, folder: Path) -> None:
    import torch

    weights = read_weights(folder)
    parameters = dict(network.named_parameters())
    if weights.keys() != parameters.keys():
        odd = sorted(weights.keys() ^ parameters.keys())
        raise InputError(f"{folder / WEIGHTS}: not the tensors of its recipe's model", odd[:5])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """Read every file and compare size, sha256, page CRCs and digests with the manifest.

    raises   EnvironmentFault (corrupt_file) that names the first damaged file
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        with _damage_is_named(path):
            found = _file_record(path)
        if found.bytes != expected.bytes:
            raise _corrupt(path, f"{found.bytes:,} bytes, the manifest says {expected.bytes:,}")
        if found.sha256 != expected.sha256:
            raise _corrupt(path, f"sha256 is {found.sha256}, the manifest says {expected.sha256}")
    read_weights(folder)
    read_curve(folder)
    if STATE in manifest.files:
        read_state(folder)
    return manifest


def _read_tensors(folder: Path, name: str, expected_sha256: str) -> dict[str, torch.Tensor]:
    path = folder / name
    with _damage_is_named(path), _open_parquet(path) as file:
        split = _is_byte_split(file)
        tensors = {tensor: _tensor_of(file.read_row_group(group), split) for tensor, group in _row_groups(file).items()}
        if (found := content_sha256(tensors)) != expected_sha256:
            raise _corrupt(path, f"its tensors have digest {found}, the manifest says {expected_sha256}")
        return tensors


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
        yield file


def _row_groups(file: Any) -> dict[str, int]:
    """Which row group holds which tensor, from the statistics of the column of names."""
    metadata = file.metadata
    return {metadata.row_group(i).column(0).statistics.min: i for i in range(metadata.num_row_groups)}


def _is_byte_split(file: Any) -> bool:
    return bool(json.loads(file.metadata.metadata[b"geosweep"])["byte_split"])


def _tensor_of(rows: Any, byte_split: bool) -> torch.Tensor:
    import torch

    dtype = getattr(torch, rows["dtype"][0].as_py())
    tensor = torch.empty(rows["shape"][0].as_py(), dtype=dtype)
    content = _bytes_of(tensor)
    for offset, nbytes, data in zip(rows["offset"].to_pylist(), rows["nbytes"].to_pylist(), rows["data"], strict=True):
        chunk = np.frombuffer(data.as_buffer(), np.uint8)
        if byte_split:
            content[offset : offset + nbytes].reshape(-1, tensor.element_size())[:] = chunk.reshape(
                tensor.element_size(), -1
            ).T
        else:
            content[offset : offset + nbytes] = chunk
    return tensor


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor: its own memory where it lies contiguous on the CPU, else a copy."""
    import torch

    content: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _file_record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=path.stat().st_size)


def _json_sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _damage_is_named(path: Path) -> Iterator[None]:
    """Whatever a reader says about a damaged file, as one error that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise _corrupt(path, "the file is missing") from error
    except PermissionError as error:
        raise EnvironmentFault("storage_error", f"{path}: {error.strerror}", "get the permission to read it") from error
    except (OSError, pa.ArrowException, ValidationError, ValueError, LookupError, TypeError, AttributeError) as error:
        found = str(error).partition("\n")[0] or type(error).__name__
        raise _corrupt(path, f"it is damaged: {found}") from error


def _corrupt(path: Path, what: str) -> EnvironmentFault:
    return EnvironmentFault("corrupt_file", f"{path}: {what}", AGAIN)


def _checkpoints_near(folder: Path) -> str:
    found: Iterable[Path] = sorted(folder.glob(f"*/{MANIFEST}")) if folder.is_dir() else ()
    near = ", ".join(str(path.parent) for path in found)
    return f"checkpoints in it: {near}" if near else "give the folder of one checkpoint"
