"""See at the start that every machine of a cluster reaches the store, and the same one.

run, eval -> [reach] -> temporary/ of the store
The driver writes a file, each node reads it and writes an answer, the driver reads that: so a folder of the same name
that is another disk is found out, and one that is mounted for reading only.
"""

from __future__ import annotations

import contextlib
import uuid
from functools import partial
from pathlib import Path

from orchestrator.store.durable import write_new
from orchestrator.store.layout import StoreLayout
from trainers.errors import EnvironmentFault


def require_visible_store(layout: StoreLayout) -> None:
    """raises EnvironmentFault (store_invisible) with a line for each node that does not see the store as we do."""
    from cluster.connect import call_on_every_node

    question, word = layout.temporary(), uuid.uuid4().hex
    write_new(question, word.encode(), layout.temporary())
    try:
        lines = []
        for node, answered in call_on_every_node(partial(_answer, layout.root, question, word)).items():
            problem = _problem(answered, word)
            if problem:
                lines.append(f"{node}: {problem}")
    finally:
        question.unlink(missing_ok=True)
    if lines:
        what = "\n  ".join(
            [f"{layout.root}: {len(lines)} nodes do not see this store, nothing was started", *sorted(lines)]
        )
        step = "mount the same folder at the same path on every node, or use a store on S3: --store s3://BUCKET/PREFIX"
        raise EnvironmentFault("store_invisible", what, step)


def _answer(root: Path, question: Path, word: str) -> str | Path:
    """On a node: the file that it wrote, or why it could not."""
    if not root.exists():
        return f"there is no folder {root}"
    if not question.exists():
        return f"the folder {root} there is another one"
    if question.read_text() != word:
        return f"the folder {root} there shows older content"
    layout = StoreLayout(root)
    answer = layout.temporary()
    write_new(answer, word.encode(), layout.temporary())
    return answer


def _problem(answered: object, word: str) -> str | None:
    """What is wrong with a node's answer; None if all is well."""
    if isinstance(answered, Path):
        with contextlib.suppress(FileNotFoundError):
            read = answered.read_text()
            answered.unlink()
            return None if read == word else "what it writes there is not what is read here"
        return "what it writes there does not arrive here"
    return " ".join(str(answered).split())[:400]
