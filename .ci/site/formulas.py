"""Hooks of MkDocs: formulas become MathML, which browsers show without a script, and the search has a name."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return f'<{match[1]} class="formula">{convert(html.unescape(match[2]), display=display)}</{match[1]}>'


def on_page_content(content: str, **_: Any) -> str:
    """Replace the LaTeX that `pymdownx.arithmatex` found."""
    return FORMULA.sub(_mathml, content)


def on_post_page(output: str, **_: Any) -> str:
    """Name the search dialog to screen readers, which the theme does not."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
