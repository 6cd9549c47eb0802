"""See at the start that every machine of a cluster reaches the store, and the same one.

run, eval -> [reach] -> temporary/ of the store
The driver writes a file, each node reads it and writes an answer, the driver reads that: so a folder of the same name
that is another disk is found out, and one that is mounted for reading only.
"""

from __future__ import annotations

import uuid
from functools import partial

from orchestrator.store.files import folder_of
from orchestrator.store.layout import StoreLayout
from trainers.errors import EnvironmentFault

_MOUNT = "mount the same folder at the same path on every node, or use a store on S3: --store s3://BUCKET/PREFIX"


def require_visible_store(layout: StoreLayout) -> None:
    """raises EnvironmentFault (store_invisible) with a line for each node that does not reach the store as we do."""
    from cluster.connect import call_on_every_node

    name, word = f"probe-{uuid.uuid4().hex}", uuid.uuid4().hex
    question = layout.root / "temporary" / name
    layout.files.publish(question, word.encode())
    try:
        answers = call_on_every_node(partial(_answer, layout.url, name, word))
        problems = {node: _problem(layout, answered, word) for node, answered in answers.items()}
    finally:
        layout.files.remove(question)
    lines = [f"{node}: {problem}" for node, problem in sorted(problems.items()) if problem]
    if lines:
        headline = f"{layout.url}: {len(lines)} of {len(problems)} nodes cannot work on this store, nothing was started"
        raise EnvironmentFault("store_invisible", "\n  ".join([headline, *lines]), _MOUNT)


def _answer(url: str, name: str, word: str) -> tuple[str, str]:
    """On a node: ("answer", the file that it wrote), or ("problem", why it could not)."""
    layout = StoreLayout(folder_of(url))
    if not layout.files.exists(layout.marker):
        return "problem", f"there is no store at {url}"
    try:
        read = layout.files.read(layout.root / "temporary" / name)
    except FileNotFoundError:
        return "problem", f"{url} is another store there: a file that was put into it here has not arrived"
    if read != word.encode():
        return "problem", f"{url} shows other content there"
    answer = f"{name}-{uuid.uuid4().hex}"
    layout.files.publish(layout.root / "temporary" / answer, word.encode())
    return "answer", answer


def _problem(layout: StoreLayout, answered: object, word: str) -> str | None:
    """What is wrong with a node's answer; None if all is well."""
    match answered:
        case ("answer", str(name)):
            path = layout.root / "temporary" / name
            try:
                read = layout.files.read(path)
            except FileNotFoundError:
                return "what it writes there does not arrive here"
            layout.files.remove(path)
            return None if read == word.encode() else "what it writes there is not what is read here"
        case ("problem", str(problem)):
            return problem
    return " ".join(str(answered).split())[:400]
