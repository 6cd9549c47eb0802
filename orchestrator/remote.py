"""Send a sweep to a cluster as a Ray job.

submit, resume -> [remote] -> cluster/submit.py -> `geosweep run` on the cluster
in    a sweep file, or the name of one in the store; the store as the cluster reaches it
out   the handle of the job that works on it
not   reading or writing the store from here, unless a name is all that is given
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.submit import Command, Handle, send
from orchestrator.identity import digest
from orchestrator.spec import parse, refuse
from orchestrator.store.layout import StoreLayout
from trainers.checkpoint import code_revision

SENT_AS = "sweep.yaml"


def submit_sweep(text: str, source: str, store: str, address: str, options: Sequence[str] = ()) -> Handle:
    """Send a sweep file; joins the job that works on it already.

    store    a path or URL that every machine of the cluster reaches;  options   further ones of `geosweep run`
    raises   InputError for a faulty sweep file, before anything is sent; otherwise as cluster.submit.send
    """
    spec, problems = parse(text, source)
    if spec is None or problems:
        raise refuse(source, problems, "nothing was sent")
    return send(
        address,
        Command(
            name=spec.name,
            subject=f"{store} {spec.name}",
            arguments=("run", SENT_AS, "--store", store, "--address", "auto", *options),
            files={SENT_AS: text},
            revision=digest([text, *options])[:16],
            variables={"GEOSWEEP_CODE_REVISION": code_revision()},
        ),
    )


def absolute(store: Path) -> str:
    """The store as another machine with the same mounts names it."""
    return StoreLayout(store.resolve()).url
