"""An extension of griffe: what the docstrings write as plain text, as Markdown has it."""

import re
from typing import Any

import griffe


class PlainText(griffe.Extension):
    """Turn `::` before code into a colon, and keep the sentence that ends a Raises section."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = re.sub(r"(?:\.? )?::$", ":", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = text.replace("Whatever is raised, ", "Any of them: ")
