"""Vega, Vega-Lite and Vega-Embed as one script that sets window.vegaEmbed, made in a process beside the report."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from pathlib import Path

from orchestrator.beside import serve
from orchestrator.store.files import cache_folder


def kept_script(vega_lite: str) -> str | None:
    """The script for this version of Vega-Lite ("6.1"), if an earlier report has kept it."""
    with contextlib.suppress(OSError):
        return _place(vega_lite).read_text(encoding="utf-8")
    return None


def make_script(vega_lite: str) -> str:
    """Make and keep it, which takes two seconds; a home that cannot be written to costs them each time."""
    import vl_convert

    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=vega_lite))
    with contextlib.suppress(OSError):
        _keep(_place(vega_lite), script)
    return script


def vega_script(vega_lite: str) -> str:
    """The script, kept or made."""
    return kept_script(vega_lite) or make_script(vega_lite)


def _place(vega_lite: str) -> Path:
    return cache_folder() / f"vega-lite-{vega_lite}-vl-convert-{version('vl-convert-python')}.js"


def _keep(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(script, encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    serve(make_script)
