"""The documentation of custom operators says what is so: the example, its size, and the table beside torch.library."""

import re
from pathlib import Path

import pytest
import torch

from perf.custom_ops import RIGHT, measure

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.findall(
    r"^\| (.+?) \| (right|wrong|raises)\b.*? \| (right|wrong|raises)\b.*? \|$",
    (ROOT / "docs" / "reference" / "beside_torch_library.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE,
)


def test_the_table_in_the_docs_is_what_comes_out_and_the_comparison_counts_it():
    rows = measure()
    # This package is right in every row.
    assert [(name, here) for name, _, here in rows if here[0] != RIGHT] == []
    assert [name for name, _, _ in TABLE] == [name for name, _, _ in rows]
    kinds = [library for _, library, _ in TABLE]
    comparison = (ROOT / "docs" / "explanation" / "comparison.md").read_text(encoding="utf-8")
    assert f"{len(kinds)} things done with `torch.library.custom_op`" in comparison
    assert f"{kinds.count('right')} right, {kinds.count('wrong')} silently wrong" in comparison
    assert f"{kinds.count('raises')} raise (`torch.func.grad`" in comparison
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"the table is that of torch 2.13, this is {torch.__version__}")
    assert kinds == [library[0] for _, library, _ in rows]
