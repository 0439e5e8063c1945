"""Launchers of every module are tunable and have calls, and every kernel is launched by one of them."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from types import ModuleType

import pytest
import torch

import primitives.kernels
from perf.calls import Call
from perf.ops._row_maps import RowMapOperands
from perf.ops.add_layer_norm import AddLayerNorm
from perf.ops.attention import Attention
from perf.ops.batch_norm import BatchNorm
from perf.ops.batch_norm_relu import BatchNormRelu
from perf.ops.cross_entropy import CrossEntropy
from perf.ops.layer_norm import LayerNorm
from primitives.kernels.norms._launch import Backward
from primitives.kernels.rows.maps import RowMapKernels
from primitives.kernels.runtime.kernel import Kernel
from tests.kernels.calls import dropout_calls, launched_by, short_rows

pytestmark = pytest.mark.usefixtures("on_device")


def some_calls() -> list[Call]:
    """Every launcher, in every mode that its operands have."""
    rows, added = LayerNorm.draw((9, 40)), AddLayerNorm.draw((9, 40))
    groups = (2, 2, 2, 20)
    operands = (
        *(
            rows,
            LayerNorm.draw(groups, norm_ndim=2, grouped=1),
            LayerNorm.draw(groups, norm_ndim=2, grouped=1, silu=True),
            added,
        ),
        *(kind.draw((2, 40), 1) for kind in (*RowMapOperands.__subclasses__(), CrossEntropy)),
        *(BatchNorm.draw((2, 3, 5, 5)), BatchNormRelu.draw((2, 3, 5, 5)), Attention.draw((1, 1, 3, 4), 3)),
    )
    # Every kernel of a forward: centered or not, with SiLU or a rounded x_hat.
    kinds = itertools.product((LayerNorm, AddLayerNorm), (torch.float16, torch.bfloat16), (False, True))
    forwards = [kind.draw((9, 40), dtype).change(rounded=True, centered=centered) for kind, dtype, centered in kinds]
    forwards.append(LayerNorm.draw(groups, norm_ndim=2, grouped=1, silu=True, centered=False))
    of_rms = [call for each in (rows, added) for call in each.change(centered=False).calls()]
    some_wanted = rows.call("bwd", (False, True, False)), added.call("bwd", (True, True, False, False))
    return [
        *(call for each in operands for call in each.calls()),
        *some_wanted,
        *dropout_calls(),
        *of_rms,
        *(each.call("fwd") for each in forwards),
    ]


def modules() -> list[ModuleType]:
    """Those of the rooms of families, in which a module of launchers has no underscore."""
    names = [module.name for module in pkgutil.walk_packages(primitives.kernels.__path__, "primitives.kernels.")]
    of_no_family = re.compile(r"primitives\.kernels\.(runtime\b.*|\w+)")
    return [importlib.import_module(name) for name in names if not of_no_family.fullmatch(name)]


def test_every_launcher_is_tuned_and_has_calls():
    launchers = {
        name: function
        for module in modules()
        if not re.search(r"\._|\.rows\.", module.__name__)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert launchers.keys() == {call.launcher.__name__ for call in some_calls()}
    assert all(hasattr(function, "__wrapped__") for function in launchers.values())


def test_every_kernel_is_launched(use_limits):
    things = [thing for module in modules() for thing in vars(module).values()]
    for thing in things:  # which grows
        thing = thing.kernels if isinstance(thing, RowMapKernels) else thing
        things += thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, Backward)) else ()
    kernels = {thing for thing in things if isinstance(thing, Kernel)}
    launched: set[Kernel] = set()
    for limits in ({}, short_rows(16, 1)):
        use_limits(**limits)
        launched |= {one.kernel for call in some_calls() for one in launched_by(call.results)}
    assert kernels == launched, f"kernels that no gate launches: {[one.__name__ for one in kernels - launched]}"
