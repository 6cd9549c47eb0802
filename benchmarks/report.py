"""How long `geosweep report` takes and how large its page is: 119 trials with 30 checkpoints each.

    python -m benchmarks.report [--checkpoints N] [--repeats N] [--json FILE]

The store is a synthetic study with every evaluator of the first one (tests/study_store.py): once folded, as a session
leaves it, and once without any fold, which no session leaves: 23,000 units, each a file. The two are timed in turn,
each in a process of its own, from its start to its end; the median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.status import timed
from orchestrator.store.committer import Committer
from orchestrator.store.layout import StoreLayout

LIMIT_S, LIMIT_MB = 5.0, 15.0


def make_stores(folder: Path, checkpoints: int) -> dict[str, Path]:
    """The same study twice; 119 trials."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from study_store import ALL_EVALUATORS, make_study_store

    unfolded = folder / "unfolded"
    scales, batches = ("4M", "14M", "60M"), (32, 64, 128, 256, 512, 1024)
    make_study_store(unfolded, scales=scales, batches=batches, checkpoints=checkpoints, evaluators=ALL_EVALUATORS)
    folded = Path(shutil.copytree(unfolded, folder / "folded"))
    Committer(StoreLayout(folded)).everything()
    return {"folded": folded, "unfolded": unfolded}


def measure(stores: dict[str, Path], page: Path, repeats: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in stores}
    for _ in range(repeats):
        for name, root in stores.items():
            took = timed(["report", "study", "--store", str(root), "-o", str(page)])
            found[name].append({**took, "page_mb": page.stat().st_size / 1e6})
    return {name: {key: statistics.median(one[key] for one in all_) for key in all_[0]} for name, all_ in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=30, help="of each trial")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-bench-") as folder:
        found = measure(make_stores(Path(folder), given.checkpoints), Path(folder, "report.html"), given.repeats)
    print(f"{given.checkpoints} checkpoints a trial; load {os.getloadavg()[0]:.1f}")
    for name, numbers in found.items():
        limit = f"   limit {LIMIT_S:g} s, {LIMIT_MB:g} MB" * (name == "folded")
        size = f"{numbers['page_mb']:.1f} MB"
        print(
            f"report, {name:<10} {numbers['wall_s']:6.2f} s, {numbers['cpu_s']:6.2f} s CPU, {size}{limit}", flush=True
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
