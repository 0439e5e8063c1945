"""The shape of the code: layers, no circles, no private names of others."""

import ast
import collections
import functools
import graphlib
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import primitives as pr

ROOT = pathlib.Path(pr.__file__).resolve().parent.parent
PACKAGES = ("primitives", "triton_kernels", "perf")
# Layers from the bottom; a module imports from its own layer and from lower ones.
LAYERS = (
    ("primitives.kernels",),
    ("primitives._core",),
    ("primitives.decompositions", "primitives.custom"),
    (
        "primitives.ops",
        "primitives._repair",
        "primitives._distributed",
        "primitives._audit.table",
        "primitives.functional",
    ),
    ("primitives.func", "primitives.autograd", "primitives.tracing"),
    ("primitives.testing",),
    ("primitives._audit", "primitives._compiled", "primitives._warm_up"),
    ("primitives.nn",),
    ("primitives",),
)
THIRD_PARTY = {
    "primitives": {"torch", "optree"},
    # What runs compiled kernels without a GPU; imported when it is asked for.
    "primitives.testing._ptx": {"numpy", "triton"},
    "primitives.testing._kernels": {"numpy", "triton"},
    "primitives.kernels": {"torch", "triton"},
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return re.sub(r"^triton_kernels", "primitives.kernels", ".".join(parts)).removesuffix(".__init__")


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def trees():
    """Every module of the packages, parsed: seconds, for the worker that runs these tests and no other."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): parsed(path) for path in paths}


def parsed(path):
    """A module whose imports are absolute; the kernels, which stand alone, import each other by relative ones."""
    source, package = ast.parse(path.read_text(encoding="utf-8")), module_name(path.with_name("__init__.py"))
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            is_kernel = f"{name}.".startswith("primitives.kernels.") and package.startswith("primitives.kernels")
            assert (node.level > 0) == is_kernel, f"{path}: relative imports are for kernels, of kernels alone: {name}"
            node.module, node.level = name, 0
    return source


def imports(source):
    """All imports of a module: inside functions and for types alone, too."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in trees() else node.module for name in names)


@functools.cache
def imported():
    return {module: set(imports(source)) for module, source in trees().items()}


def layer(module):
    """The first that a module lies in: the last one is the package itself and its command line."""
    return next(i for i, prefixes in enumerate(LAYERS) if any(f"{module}.".startswith(f"{p}.") for p in prefixes))


def defined(source):
    """Every name that a module gives to anything, attributes included."""
    for node in ast.walk(source):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


# Names that torch and Python document without a public spelling, and torch's own modules.
OF_OTHERS = {*dir(torch.Tensor), *dir(collections.namedtuple("Any", ())), "_VF", "_library"}


def foreign_names(sources):
    """Private names that a module reads of another one of ours: imported, or attributes that only others define."""
    own = {module: set(defined(source)) for module, source in sources.items()}
    ours = set().union(*own.values()) - OF_OTHERS
    for module, source in sources.items():
        for node in ast.walk(source):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PACKAGES:
                names = [(alias.name, f"{node.module}.{alias.name}") for alias in node.names]
                yield from (f"{module}: {path}" for name, path in names if is_private(name) and path not in trees())
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr in ours - own[module]:
                text = ast.unparse(node)
                yield from [] if text.startswith(("torch.", "self.", "cls.")) else [f"{module}: {text}"]


def test_imports_point_downward():
    wrong = []
    for module, names in imported().items():
        package = module.split(".")[0]
        found = (names for prefix, names in THIRD_PARTY.items() if f"{module}.".startswith(f"{prefix}."))
        allowed = sys.stdlib_module_names.union(*found, {package})
        for name in names if package in THIRD_PARTY else ():
            is_above = package == "primitives" and name in trees() and layer(name) > layer(module)
            if is_above or name.split(".")[0] not in allowed:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_no_module_imports_itself_through_others():
    own = {module: {name for name in names - {module} if name in trees()} for module, names in imported().items()}
    # Raises with the circle if there is one.
    assert len([*graphlib.TopologicalSorter(own).static_order()]) == len(trees())


# Functions that run on a device are named in the keys of the tables of machine code.
DEVICE_FUNCTIONS = re.compile(r"primitives\.kernels\.\w+\._\w+_kernels: primitives\.kernels\.\w+\._\w+_kernels\.")


def test_private_names_are_read_in_their_own_module_alone():
    faults = {"primitives.a": "class A:\n  _x = 1", "primitives.b": "a._x\nfrom primitives.a import _y\ntorch._z"}
    assert len(list(foreign_names({name: ast.parse(text) for name, text in faults.items()}))) == 2
    assert [name for name in foreign_names(trees()) if not DEVICE_FUNCTIONS.match(name)] == []


@pytest.mark.nightly
def test_tests_for_a_gpu_are_collected_in_one_process():
    """As `make gpu-test` does, which meets files that no other target has in one process, and stops at an error."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "--device", "cuda", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-W", "default", "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tests/kernels/test_every_launcher.py" in done.stdout
