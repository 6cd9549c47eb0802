"""Our loop: python -m benchmarks.peers.ours RECIPE CORPUS STEPS THREADS DEVICE."""

from __future__ import annotations

from benchmarks.peers.common import arguments, peak_mib, report
from trainers.loop import CurveRecord, Execution, Training


def main() -> None:
    given = arguments()
    before = peak_mib()
    training = Training.fresh(given.recipe, given.corpus, Execution(device=given.device, threads=given.threads))
    records: list[CurveRecord] = []
    per_step = given.recipe.tokens_per_step
    training.train_to(given.steps * per_step, lambda: False, records.append)
    report(given, [per_step / record.tokens_per_s for record in records], [record.loss for record in records], before)


if __name__ == "__main__":
    main()
