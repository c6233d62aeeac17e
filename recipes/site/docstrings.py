"""What mkdocstrings shall read in docstrings as the house writes them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Docstrings whose examples are code, and whose other paragraphs hold no Markdown."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a public object, before it is taken apart."""
        if obj.docstring and not obj.is_alias:
            text = re.sub(r"^Example:", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"  # doctest: .*", "", text)
