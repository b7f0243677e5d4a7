"""The tree in CONTRIBUTING.md is the real one, folders have doors, code is in short pieces."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "shardclip"
LISTED = re.compile(r"^  (?P<name>[\w.]+/?)(?:  | *$)", re.MULTILINE)
PUBLIC = {"adapters", "adaptive", "logging", "outcome", "run_file"}
"""Modules that only re-export, as users import them."""
SHIPPED = sorted([*LIBRARY.rglob("*.py"), *(ROOT / "launch").rglob("*.py")])
LONG_SIGNATURES = {"clipping/clipper.py: __init__"}  # has a line for each of the settings
FOLDERS = sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))


def tree() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text[text.index("```\nshardclip/") :].split("```")[1]


def test_the_tree_in_contributing_is_the_real_one():
    listed = set(LISTED.findall(tree().split("\nlaunch/")[0]))
    folders = {f"{name}/" for name in FOLDERS if name not in PUBLIC}
    files = {path.name for path in LIBRARY.glob("*.py") if not path.name.startswith("_")}
    files -= {f"{name}.py" for name in PUBLIC}
    assert listed == folders | files | {"__init__.py"}


def test_every_top_level_folder_is_named():
    # what frameworks leave behind where tests run are empty folders
    folders = [path for path in ROOT.iterdir() if any(one.is_file() for one in path.rglob("*"))]
    held = {path.name for path in folders if path.name[0] not in "._"}
    built = {"build", "dist", "runs", "shardclip-runs"}
    held = {name for name in held - built if not name.endswith(".egg-info")}
    named = set(re.findall(r"^(\w+(?:\.d)?)/", tree(), re.MULTILINE))
    assert held <= named


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_there(folder):
    text = ast.get_docstring(ast.parse((LIBRARY / folder / "__init__.py").read_text()))
    assert text
    assert "." in text


@pytest.mark.parametrize("path", sorted(LIBRARY.glob("*/**/*.py")), ids=str)
def test_nothing_is_imported_past_a_door(path):
    """Other folders import from `shardclip.FOLDER`; what it re-exports is what they use."""
    own = path.relative_to(LIBRARY).parts[0]
    if own in PUBLIC:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardclip."):
            _, folder, *deeper = node.module.split(".")
            assert not deeper or folder == own, node.module


@pytest.mark.parametrize("name", ["adaptive", "logging", "outcome", "run_file"])
def test_a_public_module_only_re_exports(name):
    body = ast.parse((LIBRARY / f"{name}.py").read_text()).body
    kinds = [type(node) for node in body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.Assign]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    """At most 300 lines a file, and 40 a function without its docstring."""
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            said = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
            lines = node.end_lineno - node.lineno + 1 - said
            known = any(f"{path}: {node.name}".endswith(name) for name in LONG_SIGNATURES)
            assert lines <= 40 or known, f"{node.name} has {lines} lines"
