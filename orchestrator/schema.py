"""Say what every stored table and every view holds: column, type, unit, meaning.

writers -> [schema] -> store/inbox.py -> views.py -> query
in    nothing
out   TABLES, VIEWS, FORMAT_VERSION; one pyarrow schema per table
not   files, DuckDB, Ray, torch
All times are UTC, all counts int64. A column with `circumstance` tells how a row came about (host, duration, attempt)
and is not part of the result: it is not compared when the same key is written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import pyarrow as pa

FORMAT_VERSION = 1

STRING = pa.string()
INT = pa.int64()
DOUBLE = pa.float64()
BOOL = pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
STRINGS = pa.list_(pa.field("element", STRING))  # as Parquet calls the items of a list
UNIT_KEY = pa.field("unit_key", STRING, False, metadata={"unit": "", "meaning": "name of the unit the row came with"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table or view; unit "" where there is none."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = False
    circumstance: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """One table or view.

    key        the columns that no two rows share; a null in them is a value like any other
    columns    in their stored order
    unit       the columns that all rows of one inbox file share and that name the file; () for a view
    pieces_by  for a table whose units are written in pieces: the column whose first and last value also name the file
    near       columns by whose values folded rows lie together, before the key; () where the key does that
    """

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    unit: tuple[str, ...] = ()
    pieces_by: str = ""
    near: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def schema(self) -> pa.Schema:
        """Field metadata: unit and meaning; schema metadata: geosweep_format and geosweep_table."""
        return _schema_of(self)

    @property
    def folded_schema(self) -> pa.Schema:
        """As `schema`, with the column that the fold adds: which unit a row came with."""
        return self.schema.append(UNIT_KEY)

    @property
    def order(self) -> tuple[str, ...]:
        """What folded rows are sorted by."""
        return (*self.near, *(name for name in self.key if name not in self.near))


@cache
def _schema_of(table: Table) -> pa.Schema:
    fields = [
        pa.field(c.name, c.type, c.nullable, metadata={"unit": c.unit, "meaning": c.meaning}) for c in table.columns
    ]
    return pa.schema(fields, metadata={"geosweep_format": str(FORMAT_VERSION), "geosweep_table": table.name})


def _column(name: str, type_: pa.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name=name, type=type_, unit=unit, meaning=meaning)


def _nullable(name: str, type_: pa.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name=name, type=type_, unit=unit, meaning=meaning, nullable=True)


def _made(name: str, type_: pa.DataType, meaning: str, unit: str = "") -> Column:
    """A column that is always there, but says how the row came about first: made again, it may differ."""
    return Column(name=name, type=type_, unit=unit, meaning=meaning, circumstance=True)


def _circumstance(name: str, type_: pa.DataType, meaning: str, unit: str = "") -> Column:
    return Column(name=name, type=type_, unit=unit, meaning=meaning, nullable=True, circumstance=True)


_TIME = Column(name="time", type=TIME, unit="UTC", meaning="when the row was made", circumstance=True)
_HOST = _circumstance("host", STRING, "machine that made the row")
_WALL = _circumstance("wall_s", DOUBLE, "how long it took", "s")
_SWEEP = _column("sweep", STRING, "name of the sweep")
_REVISION = _column("revision", STRING, "digest of the submitted sweep")
_TRIAL = _column("trial", STRING, "id of the trial")
_SEGMENT = _column("segment", STRING, "id of the segment")
_CHECKPOINT = _column("checkpoint", STRING, "digest of the checkpoint")
_TOKENS = _column("tokens", INT, "tokens that the checkpoint has seen", "tokens")
_EVALUATION = (
    _column("evaluator", STRING, "kind of evaluation: geometry, loss, ..."),
    _column("settings_digest", STRING, "digest of the evaluator's settings"),
    _column("evaluator_version", INT, "version of the evaluator's code; numbers of two versions are not compared"),
)

TRIALS = Table(
    name="trials",
    meaning="one row per trial of a submitted sweep: the whole recipe; of an imported model what is known, else null",
    key=("sweep", "revision", "trial"),
    unit=("sweep", "revision"),
    columns=(
        _SWEEP,
        _REVISION,
        _TRIAL,
        _column("grids", STRINGS, "names of the grids that hold this cell"),
        _column("family", STRING, "model family: olmo, pythia, ..."),
        _column("scale", STRING, "name of the model scale"),
        _column("params_all", INT, "all parameters", "parameters"),
        _column("params_no_input_embedding", INT, "parameters without the input embedding", "parameters"),
        _column("params_body", INT, "parameters without input embedding and unembedding", "parameters"),
        _column("context", INT, "length of a training sequence", "tokens"),
        _nullable("batch_size", INT, "sequences of one optimizer step", "sequences"),
        _nullable("weight_decay", DOUBLE, "AdamW weight decay"),
        _nullable("peak_lr", DOUBLE, "highest learning rate"),
        _nullable("schedule", STRING, "shape of the learning rate: cosine, linear, constant, wsd"),
        _nullable("warmup_tokens", INT, "length of the warm-up", "tokens"),
        _nullable("decay_tokens", INT, "length of the final decay; null unless the schedule is wsd", "tokens"),
        _nullable("final_lr_fraction", DOUBLE, "last learning rate as a share of the highest"),
        _column("token_budget", INT, "tokens that the trial trains on", "tokens"),
        _nullable("seed", INT, "seed of initialisation and data order"),
        _nullable("attention", STRING, "layout of the block: sequential or parallel"),
        _column("tied", BOOL, "input embedding and unembedding are one matrix"),
        _nullable("precision", STRING, "number format of the forward pass"),
        _nullable("corpus", STRING, "name of the training corpus"),
        _nullable("corpus_digest", STRING, "digest of its token files"),
        _column("varied", STRING, "JSON: axis -> value of this cell"),
        _column("recipe", STRING, "JSON: every field that can change a number"),
        _column("recipe_digest", STRING, "digest of the recipe"),
        _nullable("steps", INT, "optimizer steps", "steps"),
        _nullable("flops", DOUBLE, "training cost, unembedding counted", "FLOP"),
    ),
)

CHAINS = Table(
    name="chains",
    meaning="which segments a trial consists of, in order",
    key=("sweep", "revision", "trial", "position"),
    unit=("sweep", "revision"),
    columns=(
        _SWEEP,
        _REVISION,
        _TRIAL,
        _column("position", INT, "place of the segment in the trial, from 0"),
        _SEGMENT,
        _nullable("parent", STRING, "segment that this one continues; null for fresh weights"),
        _column("from_tokens", INT, "tokens seen at its start", "tokens"),
        _column("to_tokens", INT, "tokens seen at its end", "tokens"),
        _column("asked", BOOL, "the sweep wants a checkpoint at its end; false: it ends where trials part"),
    ),
)

ASKED = Table(
    name="asked",
    meaning="evaluations that a sweep asks for at the end of a segment",
    key=("sweep", "revision", "segment", "evaluator", "settings_digest", "evaluator_version", "request"),
    unit=("sweep", "revision", "evaluator", "settings_digest", "evaluator_version", "request"),
    columns=(
        _SWEEP,
        _REVISION,
        _SEGMENT,
        *_EVALUATION,
        _TOKENS,
        _column("settings", STRING, "JSON: the evaluator's settings"),
        _column("request", STRING, "digest of the segments asked for at once, by the sweep or by eval later"),
    ),
)

SEGMENTS = Table(
    name="segments",
    meaning="how each segment ended; one row each: committed before diverged before the newest failure",
    # A failed segment may be resumed and commit: its failure stays as a row of its own, and the view shows what counts.
    key=("segment", "state", "reason"),
    unit=("segment", "state", "reason"),
    columns=(
        _SEGMENT,
        _circumstance("parent", STRING, "segment that it continued; null for fresh weights"),
        _made("from_tokens", INT, "tokens seen where it started", "tokens"),
        _column("to_tokens", INT, "tokens asked for at its end", "tokens"),
        _column("state", STRING, "committed, diverged or failed"),
        _nullable("reason", STRING, "why it diverged or failed; null when committed"),
        _nullable("diverged_at_tokens", INT, "tokens seen when the loss stopped being finite", "tokens"),
        _made("tokens_trained", INT, "tokens that this segment trained on", "tokens"),
        _circumstance("attempt", INT, "which attempt ended so"),
        _WALL,
        _HOST,
        _circumstance("device", STRING, "device that trained it"),
        _circumstance("threads", INT, "CPU threads of the attempt", "threads"),
        _TIME,
    ),
)

CHECKPOINTS = Table(
    name="checkpoints",
    meaning="one row per committed segment: the checkpoint at its end",
    # Trials that train alone, though they could share, leave equal checkpoints at the ends of segments of their own.
    key=("checkpoint", "segment"),
    unit=("checkpoint", "segment"),
    columns=(
        _CHECKPOINT,
        _SEGMENT,
        _TOKENS,
        _column("steps", INT, "optimizer steps that the checkpoint has seen", "steps"),
        _column("path", STRING, "folder, relative to the store"),
        _made("bytes", INT, "size of all files", "bytes"),
        _made("files", STRING, "JSON: file name -> {sha256, bytes}, as first made; the manifest in the folder counts"),
        _column("unembedding_sha256", STRING, "sha256 of the unembedding matrix"),
        _column("weights_sha256", STRING, "sha256 of all weights"),
        _column("dtype", STRING, "number format of the weights"),
        _column("tied", BOOL, "input embedding and unembedding are one matrix"),
        _column("vocab_size", INT, "entries of the tokenizer", "tokens"),
        _column("vocab_rows", INT, "rows of the unembedding, padding included", "rows"),
        _column("history_digest", STRING, "digest of all that led to this state"),
        _made("code_revision", STRING, "revision of the code that trained it"),
        _TIME,
        _circumstance("versions", STRING, "JSON: package -> version"),
    ),
)

METRICS = Table(
    name="metrics",
    meaning="one row per metric value of an evaluation",
    key=(
        "checkpoint",
        "evaluator",
        "settings_digest",
        "evaluator_version",
        "metric",
        "dataset",
        "split",
        "layer",
    ),
    unit=("checkpoint", "evaluator", "settings_digest", "evaluator_version"),
    near=("segment", "tokens"),
    columns=(
        _CHECKPOINT,
        _circumstance("segment", STRING, "a segment that ended with this checkpoint"),
        _TOKENS,
        *_EVALUATION,
        _column("metric", STRING, "name of the metric"),
        _column("metric_version", INT, "version of the metric's definition"),
        _nullable("dataset", STRING, "evaluation set; null for a metric of the weights"),
        _nullable("split", STRING, "split of the evaluation set"),
        _nullable("layer", INT, "layer, from 0; null for the whole model"),
        _nullable("value", DOUBLE, "the number, in the row's unit"),
        _column("unit", STRING, "unit of the value"),
        _nullable("n", INT, "how many items the value is over"),
        _column("convention", STRING, "JSON: choices that define the number"),
        _WALL,
        _HOST,
        _TIME,
    ),
)

FAILURES = Table(
    name="failures",
    meaning="evaluations that could not be done, and why; values that are in metrics count before a failure",
    # Tried again (`geosweep eval --retry-failed`) it may fail for another reason, which is a row of its own.
    key=("checkpoint", "evaluator", "settings_digest", "evaluator_version", "reason"),
    unit=("checkpoint", "evaluator", "settings_digest", "evaluator_version", "reason"),
    columns=(
        _CHECKPOINT,
        _SEGMENT,
        _TOKENS,
        *_EVALUATION,
        _column("reason", STRING, "why it could not be done"),
        _circumstance("tries", INT, "how often it was tried"),
        _HOST,
        _TIME,
    ),
)

CURVES = Table(
    name="curves",
    meaning="training curve, one row per segment and step; the newest attempt counts",
    key=("segment", "step"),
    # The attempt names the file: on a GPU the repeat of a killed attempt may differ in the last bits.
    unit=("segment", "attempt"),
    pieces_by="step",
    columns=(
        _SEGMENT,
        Column(name="attempt", type=INT, unit="", meaning="attempt that wrote the row", circumstance=True),
        _column("step", INT, "optimizer step, counted from fresh weights", "steps"),
        _column("tokens", INT, "tokens seen after the step", "tokens"),
        _column("loss", DOUBLE, "mean training loss of the step", "nats/token"),
        _column("lr", DOUBLE, "learning rate of the step"),
        _column("weight_decay", DOUBLE, "weight decay of the step"),
        _column("grad_norm", DOUBLE, "norm of the gradient before clipping"),
        _circumstance("tokens_per_s", DOUBLE, "training speed", "tokens/s"),
    ),
)

EVENTS = Table(
    name="events",
    meaning="what happened, for people and for counting faults",
    key=("event",),
    unit=("event",),
    columns=(
        _column("event", STRING, "id of the event"),
        _TIME,
        _SWEEP,
        _nullable("trial", STRING, "id of the trial"),
        _nullable("segment", STRING, "id of the segment"),
        _nullable("attempt", INT, "attempt"),
        _column("kind", STRING, "sweep_submitted, started, committed, diverged, node_lost, ..."),
        _HOST,
        _column("detail", STRING, "what a person needs to know; the revision for sweep_submitted"),
    ),
)

SPEEDS = Table(
    name="speeds",
    meaning="how fast devices train: one row per measurement of `geosweep bench`",
    key=("speed",),
    unit=("speed",),
    columns=(
        _column("speed", STRING, "id of the measurement"),
        _TIME,
        _column("device", STRING, "name of the device"),
        _column("kind", STRING, "cuda or cpu"),
        _column("family", STRING, "model family: olmo, pythia, ..."),
        _column("scale", STRING, "name of the model scale"),
        _column("context", INT, "length of a training sequence", "tokens"),
        _column("batch_size", INT, "sequences of one optimizer step", "sequences"),
        _nullable("micro_batch", INT, "sequences of one forward pass; null: the whole batch", "sequences"),
        _column("vocab_rows", INT, "rows of the unembedding, padding included", "rows"),
        _column("precision", STRING, "number format of the forward pass"),
        _column("threads", INT, "CPU threads", "threads"),
        _column("steps", INT, "timed steps", "steps"),
        _column("tokens_per_s", DOUBLE, "training speed: tokens of a step by the median time of a step", "tokens/s"),
        _column("flops_per_token", DOUBLE, "training cost, unembedding counted", "FLOP/token"),
        _column("code_revision", STRING, "revision of the code that was timed"),
        _HOST,
    ),
)

RESUMES = Table(
    name="resumes",
    meaning="certificate of each state that training went on from: what was saved is what was loaded, and trains alike",
    key=("segment", "attempt"),
    unit=("segment", "attempt"),
    columns=(
        _SWEEP,
        _SEGMENT,
        _column("attempt", INT, "attempt at the segment that loaded the state"),
        _column("tokens", INT, "tokens that the state has seen", "tokens"),
        _column("weights_saved", STRING, "sha256 of the weights when they were saved"),
        _column("weights_loaded", STRING, "sha256 of the weights in memory after they were loaded"),
        _column("optimizer_saved", STRING, "sha256 of the optimizer's moments when they were saved"),
        _column("optimizer_loaded", STRING, "the same in memory after they were loaded"),
        _column("random_saved", STRING, "sha256 of the random state when it was saved"),
        _column("random_loaded", STRING, "the same in memory after it was loaded"),
        _column("sequence_saved", INT, "next training sequence by the saved position", "sequences"),
        _column("sequence_loaded", INT, "next training sequence that is read", "sequences"),
        _column(
            "replayed_steps", INT, "steps that an earlier attempt recorded and this machine trained again", "steps"
        ),
        _nullable("replay_difference", DOUBLE, "largest difference of their losses; null if none", "nats/token"),
        _made("device", STRING, "device that loaded it"),
        _HOST,
        _TIME,
    ),
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        t.name: t
        for t in (TRIALS, CHAINS, ASKED, SEGMENTS, CHECKPOINTS, METRICS, FAILURES, CURVES, EVENTS, SPEEDS, RESUMES)
    }
)

_EVALUATION_STATE = (
    _SWEEP,
    _REVISION,
    _SEGMENT,
    _TOKENS,
    *_EVALUATION,
    _column("settings", STRING, "JSON: the evaluator's settings"),
    _nullable("checkpoint", STRING, "digest of the checkpoint; null until it is committed"),
    _column("ready", BOOL, "the checkpoint is committed, so the evaluation can start"),
    _column("state", STRING, "done, failed, ready, waiting, or unreachable (the training before it diverged)"),
    _nullable("reason", STRING, "why it failed, the last time it was tried"),
)
_RESULTS = (*TRIALS.columns, _TOKENS, _CHECKPOINT)

VIEWS: Mapping[str, Table] = MappingProxyType(
    {
        view.name: view
        for view in (
            Table(
                name="latest",
                meaning="the current revision of each sweep: the one submitted last",
                key=("sweep",),
                columns=(_SWEEP, _REVISION, _column("time", TIME, "when it was submitted", "UTC")),
            ),
            Table(
                name="trial_checkpoints",
                meaning="the committed checkpoints of each trial, current revisions",
                key=("sweep", "trial", "checkpoint"),
                columns=(
                    _SWEEP,
                    _REVISION,
                    _TRIAL,
                    _column("position", INT, "place of the segment in the trial, from 0"),
                    _SEGMENT,
                    _TOKENS,
                    _CHECKPOINT,
                ),
            ),
            Table(
                name="evaluations",
                meaning="every evaluation that a current revision asks for, and how far it is",
                key=("sweep", "segment", "evaluator", "settings_digest"),
                columns=_EVALUATION_STATE,
            ),
            Table(
                name="owed",
                meaning="the evaluations that are still to be done: ready or waiting",
                key=("sweep", "segment", "evaluator", "settings_digest"),
                columns=_EVALUATION_STATE,
            ),
            Table(
                name="cells",
                meaning="the state of each trial of a current revision",
                key=("sweep", "trial"),
                columns=(
                    _SWEEP,
                    _REVISION,
                    _TRIAL,
                    _column("state", STRING, "complete, evaluating, training, waiting, diverged or failed"),
                    _column("tokens", INT, "tokens of its last committed checkpoint", "tokens"),
                    _column("token_budget", INT, "tokens that the trial trains on", "tokens"),
                    _column("checkpoints_done", INT, "committed checkpoints"),
                    _column("checkpoints_asked", INT, "checkpoints of the whole trial"),
                    _column("evaluations_done", INT, "evaluations with values"),
                    _column("evaluations_failed", INT, "evaluations that could not be done"),
                    _column("evaluations_asked", INT, "evaluations asked for; for a diverged cell, those it can reach"),
                    _nullable("reason", STRING, "why a segment diverged or failed"),
                ),
            ),
            Table(
                name="current_metrics",
                meaning="the metric values that results is made of: checkpoints of current revisions, one version each",
                key=("sweep", *METRICS.key),
                columns=(_SWEEP, *METRICS.columns),
            ),
            Table(
                name="saturation",
                meaning="whether a trial's loss turned before its end, by how much, and the effective rank of W then",
                key=("sweep", "trial", "dataset", "settings_digest"),
                columns=(
                    _SWEEP,
                    _TRIAL,
                    _column("dataset", STRING, "evaluation set of the loss"),
                    _column("settings_digest", STRING, "digest of the loss evaluator's settings"),
                    _nullable("in_distribution", BOOL, "the set was split off the training text; null: not known"),
                    _column("checkpoints", INT, "checkpoints with this loss"),
                    _column("turned_at_tokens", INT, "where the loss was lowest; the first such place", "tokens"),
                    _column("last_tokens", INT, "the last checkpoint with this loss", "tokens"),
                    _column("lowest_loss", DOUBLE, "loss where it turned", "nats/token"),
                    _column("last_loss", DOUBLE, "loss at last_tokens", "nats/token"),
                    _nullable("rank_at_turn", DOUBLE, "effective rank where the loss turned", "directions"),
                    _nullable("last_rank", DOUBLE, "effective rank at last_tokens", "directions"),
                    _column("rise", DOUBLE, "last_loss minus lowest_loss; 0 when it never turned", "nats/token"),
                    _nullable("rank_change", DOUBLE, "last_rank minus rank_at_turn", "directions"),
                    _nullable("saturated", BOOL, "the loss rose again while the effective rank fell"),
                ),
            ),
            Table(
                name="corpora",
                meaning="the prepared corpora: one row per domain and split",
                key=("corpus", "domain", "split"),
                columns=(
                    _column("corpus", STRING, "name of the corpus"),
                    _column("digest", STRING, "digest of its token files"),
                    _column("domain", STRING, "kind of text"),
                    _column("split", STRING, "train or heldout"),
                    _column("role", STRING, "mix: trained on; ood: for evaluation and fine-tuning"),
                    _column("tokens", INT, "tokens, end-of-text included", "tokens"),
                    _column("documents", INT, "documents"),
                    _column("bytes", INT, "UTF-8 text", "bytes"),
                    _column("bytes_per_token", DOUBLE, "UTF-8 text a token", "bytes/token"),
                    _column("unigram_entropy", DOUBLE, "loss of a model that knows token counts only", "nats/token"),
                ),
            ),
            Table(
                name="result_columns",
                meaning="which metric each metric column of results holds",
                key=("name",),
                columns=(
                    _column("name", STRING, "column of results and final"),
                    *_EVALUATION[:2],
                    _column("metric", STRING, "name of the metric"),
                    _nullable("dataset", STRING, "evaluation set"),
                    _nullable("split", STRING, "split of the evaluation set"),
                    _nullable("layer", INT, "layer, from 0"),
                    _column("unit", STRING, "unit of the values"),
                ),
            ),
            Table(
                name="results",
                meaning="one row per trial and checkpoint, one further column per metric (see result_columns)",
                key=("sweep", "trial", "checkpoint"),
                columns=_RESULTS,
            ),
            Table(
                name="final",
                meaning="results at the last checkpoint of each trial",
                key=("sweep", "trial"),
                columns=_RESULTS,
            ),
        )
    }
)


def describe(tables: Iterable[Table] = (*TABLES.values(), *VIEWS.values())) -> list[dict[str, str]]:
    """One row per column for `geosweep query --schema`: table, column, type, unit, meaning."""
    return [
        {"table": t.name, "column": c.name, "type": str(c.type), "unit": c.unit, "meaning": c.meaning}
        for t in tables
        for c in t.columns
    ]
