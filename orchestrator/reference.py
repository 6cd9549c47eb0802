"""Write sweeps/README.md: every field of a sweep file, and the sweeps that ship.

spec, evaluators.config -> [reference] -> sweeps/README.md
The meanings come from the docstrings of the models and the allowed values from their types, so the page cannot say
what the reader of sweep files does not do; a test compares the page with what this module writes.

    python -m orchestrator.reference > sweeps/README.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from evaluators.config import EVALUATOR_SETTINGS
from orchestrator.plan import load_plan
from orchestrator.planpage import amount
from orchestrator.spec import (
    SHIPPED,
    Base,
    Checkpoints,
    Execution,
    Grid,
    Keep,
    Limits,
    Resources,
    Retries,
    ScheduleFields,
    SweepSpec,
)
from trainers.config import Frozen

_INTRODUCTION = """# Sweep files

A sweep is one YAML file: one recipe (`base`), and grids that vary its fields. `geosweep check FILE` says everything
that is wrong with it, `geosweep plan FILE` shows what it asks, shares and costs, `geosweep run FILE` does it. A shipped
sweep is found by its name: `geosweep plan smoke`.

Token counts may be written 250_000, 3e8 or 8B; sizes 500MB, 10GB or 1.5TB; rates 3e-4. A field that is not known is
refused, and so is a value that does not fit: nothing is rounded or clamped. Fields of `base` are also the names of
axes; a dotted name is a field inside another (`schedule.final_fraction`). A key with commas ties fields into one axis
of tuples:

    axes: {scale: [4M, 14M], "token_budget, batch_size": [[250_000, 16], [500_000, 32]]}

Trials whose training is equal up to some token share it, bit for bit; a schedule of shape `wsd` shares most.

This page is written by `python -m orchestrator.reference > sweeps/README.md` from the models that read the file.
"""

_SECTIONS: tuple[tuple[str, type[Frozen]], ...] = (
    ("The file", SweepSpec),
    ("base", Base),
    ("base.schedule", ScheduleFields),
    ("grids", Grid),
    ("checkpoints", Checkpoints),
    ("keep", Keep),
    ("limits", Limits),
    ("execution", Execution),
    ("execution.resources", Resources),
    ("execution.retries", Retries),
)


def reference_page() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION, "## Shipped sweeps\n", "\n".join(_shipped()) + "\n"]
    parts += [_section(title, model) for title, model in _SECTIONS]
    parts.append("## evaluations\n\nA list; each entry names an evaluator, `at: every` (checkpoint, the default) or")
    parts[-1] += " `at: last`, and the evaluator's settings.\n"
    parts += [_section(f"evaluator: {name}", model, level=3) for name, model in EVALUATOR_SETTINGS.items()]
    return "\n".join(parts)


def _shipped() -> Iterator[str]:
    yield "| sweep | cells | trials | tokens asked | of them trained | question |"
    yield "|---|---|---|---|---|---|"
    for path in sorted(SHIPPED.glob("*.yaml")):
        _, plan = load_plan(path.read_text(encoding="utf-8"), path.name, {})
        yield (
            f"| [{path.stem}]({path.name}) | {plan.cells} | {len(plan.trials)} | {amount(plan.tokens_asked)} "
            f"| {plan.tokens_trained / plan.tokens_asked:.2%} | {plan.question} |"
        )


def _section(title: str, model: type[Frozen], level: int = 2) -> str:
    summary, _ = documented(model)
    records = [record for record in reversed(model.__mro__) if record is not Frozen and issubclass(record, Frozen)]
    meanings = {name: meaning for record in records for name, meaning in documented(record)[1].items()}
    schema = model.model_json_schema()
    rows = [
        f"| `{name}` | {meanings[name]} | {_allowed(field, schema.get('$defs', {}))} | {_default(model, name)} |"
        for name, field in schema["properties"].items()
        if name != "evaluator"
    ]
    table = ["| field | meaning | allowed | absent |", "|---|---|---|---|", *rows]
    return "\n".join([f"{'#' * level} {title}", "", summary, "", *table, ""])


def documented(model: type[Frozen]) -> tuple[str, dict[str, str]]:
    """Summary and field meanings of a model's docstring: `name, name   meaning`; indented lines continue a meaning."""
    summary, _, rest = inspect.cleandoc(model.__doc__ or "").partition("\n\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        if found := re.match(r"(\w+(?:, \w+)*)\s{2,}(\S.*)", line):
            names = found[1].split(", ")
            meanings.update(dict.fromkeys(names, found[2].replace("|", "/")))
        elif line.startswith("  "):
            meanings.update({name: f"{meanings[name]} {line.strip()}" for name in names})
    return " ".join(summary.split()), meanings


def _default(model: type[Frozen], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "refused"
    if field.default is None:
        return "the preset's, if it has one" if model in (Base, ScheduleFields) else ""
    if isinstance(field.default, Frozen):
        return "the defaults below"
    return f"`{field.default}`" if not isinstance(field.default, dict) else ""


def _allowed(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in field:
        return " or ".join(_allowed(part, definitions) for part in field["anyOf"] if part.get("type") != "null")
    if "$ref" in field:
        return "a mapping, see below"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field.get("type"):
        case "integer" | "number":
            return _number(field)
        case "array":
            return f"a list: {_allowed(field.get('items', {}), definitions)}"
        case "object":
            return "a mapping"
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "a name" if "pattern" in field else "text"
    return "values of the field"


def _number(field: Mapping[str, Any]) -> str:
    kind = "a whole number" if field["type"] == "integer" else "a number"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[name]:g}" for name, sign in bounds.items() if name in field]
    return " ".join([kind, ", ".join(limits)]).strip()


if __name__ == "__main__":
    print(reference_page(), end="")
