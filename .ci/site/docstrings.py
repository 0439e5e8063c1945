"""Griffe's changes to docstrings on their way to the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Google's guide writes `Example:` and griffe's parser `Examples:`; else the code would be read as a quotation."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of `obj`."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
