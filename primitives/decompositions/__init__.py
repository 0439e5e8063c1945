"""Decompositions: plain-torch functions that stand for operators wherever a derivative rule is missing or wrong.

Importing this package fills the tables with the ATen operators whose derivatives torch lacks or gets wrong.
"""

from primitives._core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    get_decomposition,
    register_decomposition,
    register_decomposition_for_jvp,
)
from primitives.decompositions import _batch_norms as _batch_norms
from primitives.decompositions import _gathers as _gathers
from primitives.decompositions import _grouped_mm as _grouped_mm
from primitives.decompositions import _linalg as _linalg
from primitives.decompositions import _losses as _losses
from primitives.decompositions import _norms as _norms
from primitives.decompositions import _of_torch as _of_torch
from primitives.decompositions import _reductions as _reductions
from primitives.decompositions._graph import decomposition_graph

__all__ = [
    "decomposition_graph",
    "decomposition_table",
    "decomposition_table_for_jvp",
    "get_decomposition",
    "register_decomposition",
    "register_decomposition_for_jvp",
]
