"""Imports go one way: trainers <- evaluators <- orchestrator and cluster <- orchestrator; in a package, its order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "trainers": set(),
    "evaluators": {"trainers"},
    "cluster": {"trainers.errors"},
    "sweeps": set(),
    "orchestrator": {"trainers", "evaluators", "cluster", "sweeps"},
}

ORDER = {
    "trainers": (
        "errors config scales schedule corpus tokens batches blocks model hugging_face head optim checkpoint loop "
        "certificate __main__"
    ),
    "evaluators": (
        "config metrics geometry compare suites loss hidden finetune hub quantize gptq_child gptq_format evaluate "
        "actors __main__"
    ),
    "orchestrator": (
        "spec trackers presets identity sharing plan retention placement machines cost lint changes beside schema "
        "store corpora views query failures legs standing activity attempt tracking driving reach remote tune "
        "evals garbage preview planpage bench progress run imports backfill status certificates trialpage "
        "statistics study report bundle reference cli __main__"
    ),
    "cluster": "code connect submit testbed",
    "orchestrator.report": "numbers vega style figures effects matrices tables page write",
    "orchestrator.store": (
        "durable files copies layout leases live fences checkpoints inbox units tables committer registry sweeps verify"
    ),
}

RAY_ALLOWED = {
    "orchestrator/tune.py",
    "orchestrator/tracking.py",
    "orchestrator/evals.py",
    "orchestrator/run.py",
    "cluster/connect.py",
    "cluster/submit.py",
}


def modules() -> list[Path]:
    return sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_only_the_packages_below_its_own(path: Path) -> None:
    package = dotted(path).split(".")[0]
    for name in imported(path):
        top = name.split(".")[0]
        if top in MAY_IMPORT and top != package:
            allowed = MAY_IMPORT[package]
            assert top in allowed or any(name.startswith(entry) for entry in allowed), f"{dotted(path)} imports {name}"


@pytest.mark.parametrize("package", ORDER)
def test_inside_a_package_imports_follow_the_order_of_the_flow(package: str) -> None:
    order = ORDER[package].split()
    folder = ROOT.joinpath(*package.split("."))
    found = {path.stem for path in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
    assert found - {"__init__"} == set(order), f"{package}: the order lists other modules than there are"
    for name in order:
        path = folder / f"{name}.py"
        for other in imported(path) if path.exists() else ():
            rest = other.removeprefix(f"{package}.") if other.startswith(f"{package}.") else ""
            module = rest.split(".")[0]
            if module in order:
                assert order.index(module) < order.index(name), f"{package}.{name} imports {other}, which comes later"


def test_only_the_modules_at_rays_edge_import_ray() -> None:
    found = {str(path.relative_to(ROOT)) for path in modules() if any(n.split(".")[0] == "ray" for n in imported(path))}
    assert found <= RAY_ALLOWED
