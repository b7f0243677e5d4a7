"""A hook of mkdocs: what the pages link to in the repository is part of the site.

In the repository a page's link such as `../examples/plain_loop.py` leads out of docs/; in the site
the linked file lies beside the pages.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINKED = ("examples/**/*.py", "slurm/*.sbatch", "benchmarks/RESULTS.md", "benchmarks/pictures/*")
RESULTS = "benchmarks/RESULTS.md"
NO_RESULTS = "# Results\n\nNo records in this checkout: `make bench` makes them.\n"
WIDE = {"systems.md", "integrations.md", "migrating.md", RESULTS}
"""Pages with tables or code that need the room of the table of contents."""
_UP = re.compile(r"\]\((?P<up>(?:\.\./)+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to outside docs/."""
    for pattern in LINKED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    if files.get_file_from_path(RESULTS) is None:
        files.append(File.generated(config, RESULTS, content=NO_RESULTS))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links that lead out of docs/ stay in the site."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    depth = len(PurePosixPath(page.file.src_uri).parents) - 1

    def shortened(match: re.Match[str]) -> str:
        return match[0].replace("../", "", 1) if match["up"].count("../") > depth else match[0]

    return _UP.sub(shortened, markdown)
