"""Our loop: python -m benchmarks.peers.ours RECIPE CORPUS STEPS THREADS DEVICE."""

from __future__ import annotations

from benchmarks.peers.common import Clock, arguments, peak_mib, report
from trainers.loop import CurveRecord, Execution, Training


def main() -> None:
    given = arguments()
    before = peak_mib()
    training = Training.fresh(given.recipe, given.corpus, Execution(device=given.device, threads=given.threads))
    clock = Clock()

    def note(record: CurveRecord) -> None:
        clock.tick()
        clock.losses.append(record.loss)

    training.train_to(given.steps * given.recipe.tokens_per_step, lambda: False, note)
    report(given, clock, before)


if __name__ == "__main__":
    main()
