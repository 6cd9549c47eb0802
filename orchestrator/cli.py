"""The command line: parse, call one function, print.

person -> [cli] -> spec, plan, run, query, ...
Exit codes: 0 all is well; 1 something is unfinished or failed; 2 the input is wrong; 3 the machine or the store is at
fault; 130 stopped by Ctrl-C. Nothing here loads Ray or torch before a command needs it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from trainers.errors import GeosweepError, InputError

app = typer.Typer(
    name="geosweep",
    help="Controlled pre-training studies: one sweep file, Ray Tune, a Parquet store that answers SQL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = typer.Typer(help="Prepare, list and verify corpora.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")
store_app = typer.Typer(help="Verify, compact, export and tidy a store.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(store_app, name="store")


def _store_folder(store: object) -> Path:
    from orchestrator.store.files import folder_of

    return folder_of(str(store))


def _name(store: Path) -> str:
    from orchestrator.store.files import files_of

    return files_of(store).name(store)


StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        envvar="GEOSWEEP_STORE",
        help="folder of the store, or s3://BUCKET/PREFIX",
        parser=_store_folder,
        metavar="STORE",
    ),
]
DEFAULT_STORE = Path("geosweep-store")
SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help="a sweep file, or the name of a shipped sweep")]
SweepName = Annotated[str, typer.Argument(metavar="NAME", help="a sweep that is in the store")]
Json = Annotated[bool, typer.Option("--json", help="for programs")]
Strict = Annotated[bool, typer.Option("--strict", help="refuse a sweep whose design has warnings")]
NoShare = Annotated[bool, typer.Option("--no-share", help="train each trial alone, whatever others have in common")]
Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster's head, or auto on one of its machines; default: no cluster"),
]
Tokenizer = Annotated[str | None, typer.Option(help="a tokenizer.json, or an id on the hub; default: trained here")]

out = Console(highlight=False, soft_wrap=True)


def main() -> None:
    """Run a command; messages instead of tracebacks for what a person can mend."""
    try:
        app()
    except GeosweepError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left: `geosweep query ... | head`
        sys.stderr.close()
        sys.exit(1)


# --- before a sweep -------------------------------------------------------------------------------------------------


@app.command()
def check(sweep: SweepArgument, store: StoreOption = DEFAULT_STORE, strict: Strict = False) -> None:
    """Say everything that is wrong with a sweep file, and what its design cannot tell."""
    from orchestrator.corpora import corpus_facts
    from orchestrator.lint import lint
    from orchestrator.plan import load_plan
    from orchestrator.preview import refuse_warnings
    from orchestrator.spec import find_sweep, read_text
    from orchestrator.trackers import require_trackers

    path = find_sweep(sweep)
    spec, plan = load_plan(read_text(path), str(path), corpus_facts(store))
    require_trackers(spec, str(path))
    findings = lint(spec, plan)
    if strict:
        refuse_warnings(findings, str(path))
    out.print(f"{path}: valid; {len(plan.trials)} trials, remarks on the design: {len(findings)}", markup=False)
    for finding in findings:
        out.print(f"  {finding.severity} {finding.code}: {finding.text}\n    {finding.remedy}", markup=False)


@app.command()
def plan(
    sweep: SweepArgument,
    store: StoreOption = DEFAULT_STORE,
    as_json: Json = False,
    strict: Strict = False,
    no_share: NoShare = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="TRIAL", help="print this trial's file for `python -m trainers` instead")
    ] = None,
) -> None:
    """Show what a sweep asks, what it shares, what is wrong with its design and what it costs, before it starts."""
    from orchestrator import planpage
    from orchestrator.preview import preview, refuse_warnings
    from orchestrator.spec import find_sweep, read_text

    path = find_sweep(sweep)
    seen = preview(read_text(path), str(path), store, share=not no_share)
    if recipe is not None:
        print(planpage.trial_file(seen.plan, recipe, store), end="")
    elif as_json:
        print(json.dumps(planpage.as_json(seen), indent=2))
    else:
        where = "" if store == DEFAULT_STORE else f" --store {_name(store)}"
        planpage.show(seen, out, f"geosweep run {sweep}{where}{' --no-share' * no_share}")
    if strict:
        refuse_warnings(seen.findings, str(path))


@data.command("prepare")
def data_prepare(
    source: Annotated[
        str, typer.Argument(help="builtin, pile-10k, paloma, dolma-100-code, hf:OWNER/NAME, or a file or folder")
    ],
    name: Annotated[str | None, typer.Option(help="name of the corpus in the store; default: from the source")] = None,
    tokenizer: Tokenizer = None,
    vocab_size: Annotated[int | None, typer.Option(help="entries of a tokenizer that is trained here")] = None,
    text_column: Annotated[str | None, typer.Option(help="column that holds the text")] = None,
    domain_column: Annotated[str | None, typer.Option(help="column that names the domain")] = None,
    copy: Annotated[Path | None, typer.Option("--from", help="folder with a copy of a published suite")] = None,
    again: Annotated[bool, typer.Option("--again", help="make it anew even if it is there")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Make a corpus: documents, split, tokenizer, token files, manifest."""
    from orchestrator.corpora import prepare_corpus, settings_of

    settings = settings_of(
        source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_column=text_column,
        domain_column=domain_column,
        copy=copy,
    )
    manifest = prepare_corpus(source, store, name, settings, again=again, say=out.print)
    train = sum(split.tokens for split in manifest.splits if split.role == "mix" and split.split == "train")
    out.print(
        f"corpus '{manifest.name}' ({manifest.digest[:12]}): {train:,} training tokens, "
        f"vocabulary {manifest.tokenizer.vocab_size:,}, domains {', '.join(manifest.domains)}"
    )


@data.command("list")
def data_list(store: StoreOption = DEFAULT_STORE) -> None:
    """Show the prepared corpora: tokens, bytes a token, unigram entropy."""
    from orchestrator.query import Store, write_result

    with Store(store) as opened:
        write_result(opened.table("corpora").arrow(), "table", sys.stdout)


@data.command("verify")
def data_verify(name: str, store: StoreOption = DEFAULT_STORE) -> None:
    """Check every token file of a corpus against its sha256."""
    from orchestrator.store.copies import fetch_corpus
    from trainers.tokens import verify

    verify(fetch_corpus(store, name))
    out.print(f"corpus '{name}': every file is what its manifest says")


@app.command()
def bench(
    scale: Annotated[str, typer.Option(help="a published scale of the family, or tiny-32, tiny-64, tiny-96")] = "14M",
    family: Annotated[Literal["olmo", "pythia"], typer.Option()] = "olmo",
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 2048,
    batch_size: Annotated[int, typer.Option(help="sequences of a step")] = 8,
    micro_batch: Annotated[int | None, typer.Option(help="sequences of a forward pass; default: the batch")] = None,
    precision: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "float32",
    corpus: Annotated[str, typer.Option(help="a prepared corpus")] = "builtin",
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
    seconds: Annotated[float, typer.Option(help="of timed steps")] = 20.0,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Measure how fast this machine trains a scale; `plan` then counts its hours with it."""
    from orchestrator.bench import measure
    from orchestrator.spec import Base

    base = Base(
        preset="tiny",
        family=family,
        scale=scale,
        context=context,
        batch_size=batch_size,
        precision=precision,
        corpus=corpus,
        token_budget=10_000 * batch_size * context,
        repeat=True,
    )
    row = measure(store, base, threads=threads, micro_batch=micro_batch, seconds=seconds)
    rate = row["tokens_per_s"]
    out.print(
        f"{row['device']}, {threads} threads: {family} {scale}, {batch_size} x {context} tokens a step, {precision}:\n"
        f"{rate:,.0f} tokens/s ({rate * row['flops_per_token'] / 1e9:,.1f} GFLOP/s) by the median of {row['steps']} "
        f"steps; stored in {_name(store)}",
        markup=False,
    )


# --- a sweep --------------------------------------------------------------------------------------------------------


@app.command()
def run(
    sweep: SweepArgument, store: StoreOption = DEFAULT_STORE, no_share: NoShare = False, address: Address = None
) -> None:
    """Do what is left of a sweep: train, evaluate, store. The same command again continues."""
    from orchestrator.spec import find_sweep, read_text

    path = find_sweep(sweep)
    _run(read_text(path), str(path), store, no_share, address)


@app.command()
def resume(
    name: SweepName, store: StoreOption = DEFAULT_STORE, no_share: NoShare = False, address: Address = None
) -> None:
    """Continue a sweep from the file that the store keeps of it; with the URL of a dashboard, as a job there."""
    from orchestrator.spec import read_text
    from orchestrator.store.layout import open_existing
    from orchestrator.store.sweeps import IMPORTED, stored_sweep

    path = stored_sweep(open_existing(store), name)
    if (text := read_text(path)).startswith(IMPORTED):
        advice = f"geosweep eval {name} --evaluators ..."
        raise InputError(f"'{name}' was imported: there is nothing to train", next_step=advice)
    if address is not None and "://" in address:
        _submit(text, str(path), store, no_share, address, follow=True)
    else:
        _run(text, str(path), store, no_share, address)


@app.command()
def submit(
    sweep: SweepArgument,
    address: Annotated[str, typer.Option(help="URL of the cluster's dashboard: http://HOST:8265")],
    store: StoreOption = DEFAULT_STORE,
    no_share: NoShare = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="print its log until it ends; Ctrl-C leaves it alone")
    ] = False,
) -> None:
    """Send a sweep to a Ray cluster as a job; the same command again joins the job that is running."""
    from orchestrator.spec import find_sweep, read_text

    path = find_sweep(sweep)
    _submit(read_text(path), str(path), store, no_share, address, follow=follow)


def _submit(text: str, source: str, store: Path, no_share: bool, address: str, *, follow: bool) -> None:
    from cluster import submit as jobs
    from orchestrator import remote

    handle = remote.submit_sweep(text, source, remote.absolute(store), address, ["--no-share"] * no_share)
    print(f"{'joined' if handle.joined else 'submitted'}: {handle.id}", flush=True)
    if not follow:
        out.print(f"look: geosweep status --store {store}; stop: geosweep stop NAME --store {store}", markup=False)
    elif code := jobs.follow(handle, lambda lines: print(lines, flush=True)):
        raise typer.Exit(code)


@app.command()
def stop(
    name: SweepName,
    wait: Annotated[float, typer.Option(help="seconds to wait for the end")] = 120.0,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Ask whoever works on a sweep, on whichever machine, to save the running trials' state and end."""
    from orchestrator.driving import ask_to_stop
    from orchestrator.store.layout import open_existing

    if ask_to_stop(open_existing(store), name, wait, out.print):
        out.print(f"{name}: stopped; continue: geosweep resume {name} --store {store}")
        return
    out.print(f"{name}: has not ended within {wait:g} s; it will when its trials have saved their state")
    raise typer.Exit(1)


def _run(text: str, source: str, store: Path, no_share: bool, address: str | None) -> None:
    from orchestrator.progress import screen_for
    from orchestrator.run import run_sweep

    end = run_sweep(text, source, store, screen_for(out), share=not no_share, address=address)
    for problem in end.problems:
        out.print(f"  {problem}", markup=False)
    work = f"{end.trained} segments trained, {end.evaluated} evaluations made"
    if end.complete:
        done = work if end.trained or end.evaluated else "complete already: nothing was trained or evaluated"
        out.print(f"{end.sweep}: {done}; ask: geosweep query \"select * from final where sweep = '{end.sweep}'\"")
        return
    continued = f"continue: geosweep resume {end.sweep} --store {_name(store)}{' --no-share' * no_share}"
    out.print(f"{end.sweep}: {'stopped' if end.stopped else 'not complete'}, {work}; nothing is lost\n{continued}")
    raise typer.Exit(130 if end.stopped else 1)


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="DIR_OR_ID", help="folder of save_pretrained, or an id on the hub")],
    revision: Annotated[list[str] | None, typer.Option(help="of the hub, e.g. step1000; may be repeated")] = None,
    name: Annotated[str | None, typer.Option(help="of its sweep in the store; default: from the source")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="of its training (Pythia: 2097152)")] = None,
    tokens: Annotated[int | None, typer.Option(help="seen so far, without --revision; default: 0, unknown")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Bring a causal language model of transformers into the store, to be evaluated like any checkpoint."""
    from orchestrator.imports import import_models

    end = import_models(
        store, source, revision or [], name=name, tokens_per_step=tokens_per_step, tokens=tokens, say=out.print
    )
    head = end.manifests[-1]
    size = f"{head.parameters.all:,} parameters, W {head.unembedding}{' (tied)' * head.tied}"
    padding = head.network.vocab_rows - head.network.vocab_size
    out.print(f"trial {end.trial}: {len(end.manifests)} checkpoints, {size}, {padding} padding rows", markup=False)
    for group in end.equal:
        at = ", ".join(f"{count:,}" for count in group)
        out.print(f"  the same unembedding, bit for bit, at {at} tokens: are these the checkpoints they say?")
    out.print(f"evaluate: geosweep eval {end.sweep} --evaluators geometry --store {_name(store)}", markup=False)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="its path in the store (column path of table checkpoints), or a folder")
    ],
    target: Annotated[Path, typer.Argument(help="folder to write; it must not exist")],
    gptq: Annotated[
        int | None, typer.Option(metavar="BITS", help="packed in the auto-gptq format: 2, 3, 4 or 8 bits a weight")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="YAML", help="of --gptq, as for evaluator quantize: '{group_size: 32}'")
    ] = None,
    environment: Annotated[
        Path, typer.Option("--gptq-env", envvar="GEOSWEEP_GPTQ_ENV", help="with gptqmodel, from `make gptq-env`")
    ] = Path(".cache/gptq-env"),
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write a checkpoint as a folder that transformers' from_pretrained loads."""
    from evaluators.hub import export_model
    from orchestrator.store.checkpoints import named_checkpoint

    folder = named_checkpoint(store, checkpoint)
    if gptq is not None:
        _export_gptq(folder, target, gptq, settings or "{}", environment, store)
    elif settings is not None:
        raise InputError("--settings: of --gptq only, nothing was exported")
    else:
        export_model(folder, target, store / "corpora")
        out.print(f"{target}: AutoModelForCausalLM.from_pretrained('{target}') loads it", markup=False)


def _export_gptq(folder: Path, target: Path, bits: int, changes: str, environment: Path, store: Path) -> None:
    from evaluators.config import entry_from
    from evaluators.gptq_format import export_gptq, export_settings
    from orchestrator.store.copies import fetch_corpus

    settings = export_settings(folder, bits, entry_from(changes, "--settings"))
    for name in settings.corpora:
        fetch_corpus(store, name)
    for loss in export_gptq(folder, target, settings, bits, corpora=store / "corpora", environment=environment):
        out.print(f"{loss.dataset}: loss {loss.packed:.5f}, by evaluator quantize {loss.expected:.5f}", markup=False)
    out.print(f"{target}: {bits} bits a weight in the auto-gptq format", markup=False)


@app.command(name="eval")
def evaluate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a sweep that is in the store")],
    evaluators: Annotated[str, typer.Option(help="names, comma between them; default: all that it asks for")] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML list of evaluations with their settings")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="for default settings; else the corpus of the training")] = None,
    at: Annotated[Literal["every", "last"], typer.Option(help="checkpoints that get what is new")] = "every",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="try again what could not be done")] = False,
    actors: Annotated[int, typer.Option(min=1, help="evaluations at a time")] = 2,
    store: StoreOption = DEFAULT_STORE,
    address: Address = None,
) -> None:
    """Evaluate the checkpoints of a sweep that are there, also with evaluators that its file does not name."""
    from orchestrator.backfill import Request, evaluate_sweep
    from orchestrator.progress import screen_for

    names = tuple(part.strip() for part in evaluators.split(",") if part.strip())
    request = Request(evaluators=names, file=file, suite=suite, at=at, retry_failed=retry_failed)
    end = evaluate_sweep(store, name, request, screen_for(out), actors=actors, address=address)
    for problem in end.problems:
        out.print(f"  {problem}", markup=False)
    failed = f", {len(end.problems)} could not be done" if end.problems else ""
    out.print(f"{name}: {end.evaluated} evaluations made{failed}" + ("" if end.complete else "; more are owed"))
    if not end.complete or end.problems:
        raise typer.Exit(130 if end.stopped else 1)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="one sweep; default: all in the store")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="draw it again every two seconds")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="is each resumed training the one that was saved? exit code 1 if not"),
    ] = False,
) -> None:
    """Show each cell of a sweep: complete, training, owed, diverged, failed and why."""
    from orchestrator import status as page
    from orchestrator.query import Store

    if verify:
        _show_certificates(name, store, as_json)
        return
    where = "" if store == DEFAULT_STORE else f" --store {_name(store)}"
    with Store(store) as opened:
        if watch and not as_json:
            page.watch(opened, name, out, where)
            return
        sweeps = page.read_status(opened, name, where)
    if as_json:
        print(json.dumps(page.as_json(sweeps), indent=2))
    else:
        page.show(sweeps, out)


def _show_certificates(name: str | None, store: Path, as_json: bool) -> None:
    from orchestrator import certificates as page
    from orchestrator.query import Store

    with Store(store) as opened:
        found = page.read_certificates(opened, name)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        page.show(found, out)
    if not all(row["holds"] for row in found):
        raise typer.Exit(1)


@app.command()
def trial(
    name: Annotated[str, typer.Argument(metavar="TRIAL", help="id of a trial, or the start of one")],
    sweep: Annotated[str | None, typer.Option(help="which sweep's, where several have it")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Show one cell: recipe, loss, segments, checkpoints, metrics, events."""
    from orchestrator import trialpage
    from orchestrator.query import Store

    with Store(store) as opened:
        trialpage.show(trialpage.read_trial(opened, name, sweep), out)


@app.command()
def query(
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="one SELECT")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="SELECTs with a comment above each")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="tables, columns, units, meaning")] = False,
    form: Annotated[Literal["table", "csv", "json", "parquet"], typer.Option("--format")] = "table",
    to: Annotated[Path | None, typer.Option("--out", "-o", help="write to this file")] = None,
    limit: Annotated[int, typer.Option(help="rows of a table in the terminal; 0: all")] = 40,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Ask the store a question in SQL (DuckDB, read-only)."""
    import pyarrow as pa

    from orchestrator.query import Store, questions, write_result

    if [sql is not None, file is not None, schema].count(True) != 1:
        raise InputError("give one of SQL, --file, --schema", next_step="geosweep query --help")
    with Store(store) as opened:
        if schema:
            write_result(pa.Table.from_pylist(opened.describe()), form, to or sys.stdout, 0)
        elif sql is not None:
            write_result(opened.sql(sql).arrow(), form, to or sys.stdout, limit)
        else:
            assert file is not None
            for title, text in questions(file):
                print(f"\n{title}")
                write_result(opened.sql(text).arrow(), form, to or sys.stdout, limit)


@app.command()
def stats(
    name: SweepName,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="mixed effects for every outcome, not fine-tuning alone")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Say which geometry metric goes with which outcome: raw, with the recipe held, and as added R^2."""
    from orchestrator import study as studies
    from orchestrator.query import Store
    from orchestrator.report import tables

    with Store(store) as opened:
        study = studies.read_study(opened, store, name)
    found = studies.findings(study, study.outcomes if mixed else None)
    if as_json:
        print(json.dumps(studies.as_json(study, found), indent=2))
    else:
        tables.show(study, found, out)


@app.command()
def report(
    name: SweepName,
    to: Annotated[Path | None, typer.Option("--out", "-o", help="write to this file; default: report.html")] = None,
    form: Annotated[Literal["html", "png", "pdf", "svg"], typer.Option("--format")] = "html",
    figure: Annotated[str | None, typer.Option("--figure", help="one figure alone; not for html")] = None,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Write one page with the figures and tables of a sweep, or its figures as single files."""
    from orchestrator.report.write import write_report

    for path in write_report(store, name, form, figure, to):
        out.print(f"{name}: {path}", soft_wrap=True, markup=False)


@app.command()
def bundle(
    name: SweepName,
    to: Annotated[Path, typer.Option("--out", "-o", help="write to this file")] = Path("bundle.zip"),
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Pack tables, figures, sweep file and digests of a sweep into one zip file."""
    from orchestrator.bundle import write_bundle
    from orchestrator.query import Store

    with Store(store) as opened:
        files = write_bundle(opened, store, name, to)
    out.print(f"{name}: {files} files in {to}", soft_wrap=True, markup=False)


# --- the store ------------------------------------------------------------------------------------------------------


@store_app.command("verify")
def store_verify(store: StoreOption = DEFAULT_STORE) -> None:
    """Read every file and compare it with its checksums, its manifest and its row; exit code 3 if one is damaged."""
    from orchestrator.store.layout import open_existing
    from orchestrator.store.verify import verify

    findings = verify(open_existing(store))
    for line in findings.orphans:
        out.print(f"nothing refers to it: {line}", markup=False)
    for line in findings.damaged:
        out.print(f"damaged: {line}", markup=False)
    whole = ", ".join(f"{count:,} {kind}" for kind, count in findings.checked.items()) or "nothing"
    out.print(f"whole: {whole}; damaged: {len(findings.damaged)}; orphans: {len(findings.orphans)}", markup=False)
    if findings.damaged:
        raise typer.Exit(3)


@store_app.command("compact")
def store_compact(store: StoreOption = DEFAULT_STORE) -> None:
    """Fold every unit of the inboxes into the Delta tables, sort each into one file, and renew export/*.parquet."""
    from orchestrator.store.committer import only_committer
    from orchestrator.store.layout import create_or_open, open_existing

    layout = create_or_open(open_existing(store).root)
    with only_committer(layout) as committer:
        folded = committer.everything()
    for problem in committer.problems.values():
        out.print(problem, markup=False)
    out.print(f"{folded:,} units folded; tables in {layout.url}/tables, copies in {layout.url}/export")
    if committer.problems:
        raise typer.Exit(3)


@store_app.command("export")
def store_export(
    folder: Annotated[Path, typer.Argument(help="a new or empty folder")], store: StoreOption = DEFAULT_STORE
) -> None:
    """Write every table and view as one Parquet file each; the store is only read."""
    from orchestrator.query import Store, export

    with Store(store) as opened:
        for name, rows in export(opened, folder).items():
            out.print(f"{folder / name}.parquet: {rows:,} rows", markup=False)


@store_app.command("gc")
def store_gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Remove checkpoints and optimizer states that no sweep in the store keeps, continues from or owes a number."""
    from orchestrator.driving import only_driver
    from orchestrator.garbage import find_garbage, remove
    from orchestrator.store.checkpoints import remove_leftovers
    from orchestrator.store.layout import create_or_open, open_existing

    layout = create_or_open(open_existing(store).root)
    with only_driver(layout, "store gc"):
        garbage = find_garbage(layout)
        for item in garbage:
            out.print(f"{item.path.relative_to(layout.root)}: {item.bytes:,} bytes", markup=False)
        leftovers = 0
        if not dry_run:
            remove(layout, garbage)
            leftovers = remove_leftovers(layout)
    total = sum(item.bytes for item in garbage)
    unfinished = f"; {leftovers} unfinished objects of attempts that died" * bool(leftovers)
    out.print(f"{len(garbage)} {'would go' if dry_run else 'removed'}, {total:,} bytes{unfinished}")
