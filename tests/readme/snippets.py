"""The Python in the README and in docs/: what runs where, which names of shardclip it uses."""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(
    r"<!-- run: (?P<setting>\w+)(?: on (?P<ranks>\d) ranks)? -->\n"
    r"```python(?: [^\n]*)?\n(?P<code>.*?)```"
    r"(?:\n\n<!-- prints -->\n```text\n(?P<prints>.*?)```)?",
    re.DOTALL,
)
"""A snippet that runs: in which setting, on how many ranks, and perhaps what it prints."""
BLOCK = re.compile(r"```py(?:thon)?(?: [^\n]*)?\n(?P<code>.*?)```", re.DOTALL)
LAUNCHED = re.compile(r"<!-- run: launched by torchrun -->\n" + BLOCK.pattern, re.DOTALL)
"""A snippet that joins the process group by itself."""
ELSEWHERE = re.compile(r"<!-- of: (?P<of>\w+) -->\n" + BLOCK.pattern, re.DOTALL)
"""A snippet for a framework that the checkout's own environment has not: see tests/systems."""


def snippets(page: Path) -> list[dict[str, str]]:
    """List the snippets of a page that run, in order."""
    return [match.groupdict() | {"page": page.name} for match in MARKED.finditer(page.read_text())]


def launched(page: Path) -> list[str]:
    """List the snippets of a page that are scripts of their own."""
    return [match["code"] for match in LAUNCHED.finditer(page.read_text())]


def elsewhere(page: Path) -> list[dict[str, str]]:
    """List the snippets of a page for a framework, in order."""
    found = ELSEWHERE.finditer(page.read_text())
    return [match.groupdict() | {"page": page.stem} for match in found]


def blocks(page: Path) -> list[str]:
    """List all Python of a page."""
    return [match["code"] for match in BLOCK.finditer(page.read_text())]


def unknown_names(code: str) -> list[str]:
    """Compile a snippet; the names of shardclip's that it uses and that do not exist."""
    tree = ast.parse(code)
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardclip"):
            known = exported(str(node.module))
            wrong += [f"{node.module}.{a.name}" for a in node.names if a.name not in known]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner == "shardclip" and node.attr not in exported("shardclip"):
                wrong.append(f"shardclip.{node.attr}")
            elif owner == "GradClipper" and not hasattr(
                importlib.import_module("shardclip").GradClipper, node.attr
            ):
                wrong.append(f"GradClipper.{node.attr}")
    return wrong


def exported(module: str) -> set[str]:
    """Name what a module has, without importing it: it may need a framework."""
    folders = {"launch": ROOT / "launch"}
    first, *rest = module.split(".")
    path = ROOT / first
    for part in rest:
        path = folders.get(part, path / part) if path == ROOT / "shardclip" else path / part
    if path.is_dir():
        names = {found.stem for found in path.iterdir() if found.is_dir() or found.suffix == ".py"}
        path /= "__init__.py"
    else:
        names, path = set(), path.with_suffix(".py")
    if not path.exists():
        return set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
