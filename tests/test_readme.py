"""The README is true: its tree lists the files that there are, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.cli import app, data

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trainers", "evaluators", "cluster", "orchestrator")
PATH = re.compile(r"[\w.*-]+(\.\w+|/)(run)?|Makefile")
README = (ROOT / "README.md").read_text()


def tree() -> set[str]:
    """Paths of the tree in the README: a name that ends in / opens a folder, indentation says what lies in it."""
    found: set[str] = set()
    folders: list[tuple[int, str]] = []
    block = README[README.index("    pyproject.toml  ") :].split("\n\n")[0]
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        names = [name for name in re.split(r"\s{2,}", line.strip()) if PATH.fullmatch(name)]
        folders = [(depth, name) for depth, name in folders if depth < indent]
        above = "".join(name for _, name in folders)
        found |= {above + name for name in names}
        if names[0].endswith("/"):
            folders.append((indent, names[0]))
    return found


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in sorted(tree()) if not (ROOT / path).exists()] == []


def test_every_module_stands_in_the_tree() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert modules - tree() == set()


def test_every_command_that_the_readme_shows_exists() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {"data"} & {group.name for group in app.registered_groups} | {"store"}
    shown = set(re.findall(r"^    geosweep (\w+)", README, flags=re.MULTILINE))
    assert shown
    assert shown <= commands
    prepared = {command.name for command in data.registered_commands}
    assert set(re.findall(r"^    geosweep data (\w+)", README, flags=re.MULTILINE)) <= prepared
