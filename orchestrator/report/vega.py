"""Vega, Vega-Lite and Vega-Embed as one script that sets window.vegaEmbed; a module of its own, so that the process
that makes it beside the report imports nothing else."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from pathlib import Path

from orchestrator.store.files import cache_folder


def vega_script(vega_lite: str) -> str:
    """The script for this version of Vega-Lite ("6.1"). Making it takes two seconds, so it is kept between reports."""
    kept = cache_folder() / f"vega-lite-{vega_lite}-vl-convert-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")

    import vl_convert

    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=vega_lite))
    with contextlib.suppress(OSError):  # a home that cannot be written to costs the two seconds each time
        _keep(kept, script)
    return script


def _keep(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(script, encoding="utf-8")
    temporary.replace(path)
