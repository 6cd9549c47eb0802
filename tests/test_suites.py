"""Published suites from small copies in their own format: domains, both averages, contamination, too little text."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import geosweep
from test_evaluate import fresh_weights, recipe_for, save
from test_loss import WORDS

from evaluators.config import HiddenSettings, LossSettings
from evaluators.evaluate import evaluate
from evaluators.loss import sequence_losses
from evaluators.metrics import MetricValue
from trainers.checkpoint import load_model
from trainers.corpus import SUITES
from trainers.errors import InputError
from trainers.tokens import open_split, read_manifest

CONTEXT = 32
PARTS = SUITES["paloma"].parts
LARGE, SMALL = "c4_100_domains", "ptb"


def texts(seed: int, count: int, words: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed} {i}: " + " ".join(rng.choices(WORDS, k=words)) for i in range(count)]


def paloma_copy(folder: Path) -> Path:
    """As `hf download allenai/paloma` leaves it: a card that names the parts, PART/val/*.jsonl.gz."""
    parts = [
        f"- config_name: {part}\n  data_files:"
        + "".join(f"\n  - split: {split}\n    path: {part}/{split}/*" for split in ("val", "test"))
        for part in PARTS
    ]
    folder.mkdir()
    (folder / "README.md").write_text("---\nconfigs:\n" + "\n".join(parts) + "\n---\n")
    for number, part in enumerate(PARTS):
        rows = [{"text": text, "subdomain": None, "id": str(i)} for i, text in enumerate(texts(number, 4))]
        if part == LARGE:
            rows = [{"text": t, "subdomain": f"site{i % 3}.org/en"} for i, t in enumerate(texts(100, 30))]
            rows.append({"text": texts(101, 1, 400)[0], "subdomain": "lonely.org"})
        if part == SMALL:
            rows = [{"text": text, "subdomain": None} for text in ("one", "two")]
        for split in ("val", "test"):
            (folder / part / split).mkdir(parents=True)
            with gzip.open(folder / part / split / "part.jsonl.gz", "wt") as file:
                file.write("\n".join(json.dumps({"source": part, **row}) for row in rows))
    return folder


def pile_copy(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    names = ["Pile-CC", "Github", "ArXiv"]
    rows = [{"text": text, "meta": {"pile_set_name": names[i % 3]}} for i, text in enumerate(texts(200, 30))]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data" / "train-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Folder with the small built-in corpus, and both suites cut by its tokenizer through the command line."""
    from orchestrator.store.layout import create_or_open

    folder = tmp_path_factory.mktemp("suites")
    store = create_or_open(folder / "store").root
    (store / "corpora" / "builtin").symlink_to(corpus)
    for suite, copy in (("paloma", paloma_copy(folder / "p")), ("pile-10k", pile_copy(folder / "pile"))):
        done = geosweep(
            *("data", "prepare", suite, "--from", copy, "--tokenizer", corpus / "tokenizer.json", "--store", store)
        )
        assert done.returncode == 0, done.stderr
    return store / "corpora"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    recipe = recipe_for(corpus)
    weights = {name: tensor * 8 for name, tensor in fresh_weights(recipe).items()}
    return save(tmp_path_factory.mktemp("trial") / "0", recipe, weights)


def losses(checkpoint: Path, corpora: Path, suite: str) -> dict[tuple[str, str | None], MetricValue]:
    values = evaluate(checkpoint, LossSettings(suite=suite, tokens_per_domain=None), corpora=corpora)
    return {(value.metric, value.dataset): value for value in values}


def test_a_suite_is_all_held_out_and_its_domains_carry_their_source(corpora: Path) -> None:
    manifest = read_manifest(corpora / "paloma")
    assert {split.split for split in manifest.splits} == {"heldout"}
    assert {split.role for split in manifest.splits} == {"ood"}
    assert {f"{LARGE}/site{i}.org/en" for i in range(3)} | {f"{LARGE}/lonely.org", "gab/gab"} <= set(manifest.domains)
    assert {domain.partition("/")[0] for domain in manifest.domains} == set(PARTS)
    assert read_manifest(corpora / "pile-10k").domains == ("pile-10k/Pile-CC", "pile-10k/Github", "pile-10k/ArXiv")


def test_a_source_is_averaged_over_its_tokens_and_over_its_domains(checkpoint: Path, corpora: Path) -> None:
    found = losses(checkpoint, corpora, "paloma")
    network = load_model(checkpoint).eval()
    nats, by_domain = [], []
    for i in range(3):
        domain = f"{LARGE}/site{i}.org/en"
        split = open_split(corpora / "paloma", domain, "heldout")
        whole = split.tokens // CONTEXT * CONTEXT
        of_tokens = sequence_losses(network, split.read(0, whole).reshape(-1, CONTEXT))
        assert found["loss", domain].value == pytest.approx(of_tokens.mean(), rel=1e-12)
        nats.append(of_tokens)
        by_domain.append(of_tokens.mean())
    every = np.concatenate(nats)
    assert found["loss", LARGE].value == pytest.approx(every.mean(), rel=1e-12)
    assert found["loss", LARGE].n == len(every)
    assert found["loss_by_domain", LARGE].value == pytest.approx(np.mean(by_domain), rel=1e-12)
    assert found["loss_by_domain", LARGE].n == 3
    size = sum(int(found["loss", f"{LARGE}/site{i}.org/en"].convention["bytes"] or 0) for i in range(3))
    assert found["bits_per_byte", LARGE].value == pytest.approx(every.sum() / math.log(2) / size, rel=1e-12)
    everything = [v for (metric, name), v in found.items() if metric == "loss" and "/" in str(name) and v.value]
    total = found["loss", "all of paloma"]
    assert total.n == sum(v.n or 0 for v in everything)
    assert total.convention["domains"] == len(everything)


def test_a_domain_of_one_document_or_less_than_a_sequence_has_a_reason_instead_of_a_number(
    checkpoint: Path, corpora: Path
) -> None:
    found = losses(checkpoint, corpora, "paloma")
    for domain, says in ((f"{LARGE}/lonely.org", "one held-out document"), ("ptb/ptb", "less than one sequence")):
        value = found["loss", domain]
        assert value.value is None
        assert says in str(value.convention["undefined"])
    assert ("loss", SMALL) not in found


def test_who_may_have_trained_on_a_suite_stands_beside_every_number(checkpoint: Path, corpora: Path) -> None:
    for suite in ("paloma", "pile-10k"):
        for value in losses(checkpoint, corpora, suite).values():
            assert value.convention["contamination"] == SUITES[suite].contamination
    found = losses(checkpoint, corpora, "pile-10k")
    assert found["loss", "pile-10k"].n == sum(
        found["loss", f"pile-10k/{d}"].n or 0 for d in ("Pile-CC", "Github", "ArXiv")
    )
    own = evaluate(checkpoint, LossSettings(suite="builtin", tokens_per_domain=512), corpora=corpora)
    assert {value.convention["contamination"] for value in own} == {None}


def test_a_suite_teaches_no_tokenizer_and_has_no_mix(checkpoint: Path, corpora: Path, tmp_path: Path) -> None:
    done = geosweep("data", "prepare", "paloma", "--from", tmp_path, "--store", tmp_path / "store")
    assert done.returncode == 2
    assert "--tokenizer" in done.stderr
    with pytest.raises(InputError, match="domain: missing"):
        evaluate(checkpoint, HiddenSettings(suite="paloma"), corpora=corpora)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence_tokens": 64}, "sequence_tokens: 64, the model reads 32 at most"),
        ({"suite": "nothing"}, "no corpus 'nothing'"),
        ({"tokens_per_domain": 33}, "not a whole number of contexts"),
    ],
    ids=["context", "suite", "tokens"],
)
def test_settings_that_do_not_fit_are_refused(
    checkpoint: Path, corpora: Path, changes: dict[str, Any], says: str
) -> None:
    asked = LossSettings(**{"suite": "builtin", "tokens_per_domain": 512, **changes})
    with pytest.raises(InputError, match=says):
        evaluate(checkpoint, asked, corpora=corpora)


def test_shorter_sequences_give_another_loss_and_say_so(checkpoint: Path, corpora: Path) -> None:
    long, short = (
        evaluate(checkpoint, LossSettings(suite="builtin", tokens_per_domain=512, sequence_tokens=t), corpora=corpora)[
            0
        ]
        for t in (None, 16)
    )
    assert (long.convention["context"], short.convention["context"]) == (32, 16)
    assert long.value != short.value
