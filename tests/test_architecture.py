"""Who may import whom: experts and router know nothing of federation; federation nothing of inference."""

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
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("fedweave.")}
    return found


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
