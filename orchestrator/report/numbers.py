"""The statistics of a report, in a process that imports their libraries while the report reads the store."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pandas as pd

from orchestrator.beside import serve
from orchestrator.statistics import Findings, analyse

_LIBRARIES = ("scipy.stats", "sklearn.model_selection", "statsmodels.regression.mixed_linear_model")


def answer(question: tuple[pd.DataFrame, Mapping[str, Any]]) -> Findings:
    """question: the cells, and what statistics.analyse is to find in them."""
    cells, asked = question
    return analyse(cells, **asked)


if __name__ == "__main__":
    for library in _LIBRARIES:  # analyse imports them late, for others' sake
        importlib.import_module(library)
    serve(answer)
