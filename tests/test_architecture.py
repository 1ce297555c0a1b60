"""Who may import whom: no cycle between packages, whoever forms it; and a few directions that must stay."""

import ast
from pathlib import Path

import pytest

import fedweave

ROOT = Path(fedweave.__file__).parent
FORBIDDEN = {
    "experts": {"federation", "methods", "runs", "inference"},
    "router": {"federation", "methods", "runs", "inference"},
    "backbone": {"federation", "methods", "runs", "inference", "training"},
    "training": {"federation", "methods", "runs", "inference"},
    "federation": {"inference", "runs", "serving"},
    "inference": {"federation", "methods", "training", "serving", "bundle", "runs"},
    "bundle": {"federation", "methods", "training", "serving", "runs", "analysis", "report", "compare"},
    "runs": {"analysis", "report", "compare", "serving", "cli"},
    "analysis": {"report", "compare", "serving", "cli"},
    "report": {"compare", "serving", "cli"},
    "serving": {"federation", "methods", "training", "runs"},
    "methods": {"inference", "runs", "evaluation"},
    "data": {"federation", "methods", "training", "runs", "inference", "backbone"},
}


def imported_packages(path: Path) -> set[str]:
    """Of a file, imports inside functions included; those for a type checker alone run nowhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: list[str] = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("fedweave.")}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of packages that reach each other."""
    reach = {name: set(direct) for name, direct in graph.items()}
    for via in graph:  # Warshall
        for name in graph:
            if via in reach[name]:
                reach[name] |= reach[via]
    groups = {tuple(sorted(b for b in graph if b in reach[a] and a in reach[b])) for a in graph}
    return [list(group) for group in groups if len(group) > 1]


def test_no_cycle_between_packages():
    graph: dict[str, set[str]] = {package_of(path): set() for path in ROOT.rglob("*.py")}
    for path in ROOT.rglob("*.py"):
        own = package_of(path)
        graph[own] |= (imported_packages(path) & graph.keys()) - {own}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]  # it would see one
    assert cycles(graph) == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_dependency_rule(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imported_packages(path) & FORBIDDEN[package], path


def test_nothing_unpickles_or_evaluates():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pickle" not in ast.dump(node), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path


def test_files_stay_readable():
    assert [p for p in ROOT.rglob("*.py") if len(p.read_text(encoding="utf-8").splitlines()) > 350] == []


def test_types_say_something():
    """``Any`` where nothing better is known, and nowhere else."""
    uses = sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert uses < 100
