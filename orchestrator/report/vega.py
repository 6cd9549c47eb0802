"""Vega, Vega-Lite and Vega-Embed as one script that sets window.vegaEmbed; a module of its own, so that the process
that makes it beside the report imports nothing else."""

from __future__ import annotations


def vega_script(vega_lite: str) -> str:
    """The script for this version of Vega-Lite ("6.1"); takes two seconds."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=vega_lite))
