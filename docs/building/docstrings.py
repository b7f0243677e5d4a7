"""An extension of griffe: what the docstrings write as plain text, as Markdown has it."""

import re
from typing import Any

import griffe

_CODE_FOLLOWS = re.compile(r"(?:\.? )?::$", re.MULTILINE)
_LAST_OF_RAISES = re.compile(
    r"^(?P<indent> +)Whatever is raised, (?P<rest>.*(?:\n(?P=indent)\S.*)*)", re.MULTILINE
)


class PlainText(griffe.Extension):
    """Turn `::` before code into a colon, and keep the sentence that ends a Raises section."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = _CODE_FOLLOWS.sub(":", obj.docstring.value)
            obj.docstring.value = _LAST_OF_RAISES.sub(_as_an_entry, text)


def _as_an_entry(match: re.Match[str]) -> str:
    """Write the sentence as griffe reads an entry: a name, a colon, further lines indented."""
    rest = match["rest"].replace("\n", "\n    ")
    return f"{match['indent']}Any of them: {rest}"
