"""Launchers of every module are tunable and have calls, and every kernel is launched by one of them."""

import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import pytest

import primitives.kernels
from primitives.kernels.norms._launch import Backward
from primitives.kernels.rows.maps import RowMapKernels
from primitives.kernels.runtime.kernel import Kernel
from tests.kernels.calls import launched_by, short_rows, some_calls

pytestmark = pytest.mark.usefixtures("on_device")


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
