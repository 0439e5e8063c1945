"""The shape of the code: import direction, sizes of files, one autograd function, primitives, launch policy, docs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib
import re
import sys

import pytest

import primitives as pr
from primitives.core import registered_primitives
from tests.launch_numbers import OPTIONS, fixed_launch_numbers, named_numbers

ROOT = pathlib.Path(pr.__file__).resolve().parent.parent
PACKAGES = ("primitives", "triton_kernels")
MAX_LINES = 400
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXTS = sorted(
    path.relative_to(ROOT)
    for folder in (*PACKAGES, "tests", "perf", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
# Layers from the bottom; a module imports from its own layer and from lower ones.
LAYERS = (
    ("primitives.core",),
    (
        "primitives.func",
        "primitives.autograd",
        "primitives.decompositions",
        "primitives.custom",
        "primitives.tracing.modules",
        "primitives.tracing.memory",
        "primitives.tracing.recompute",
        "primitives.tracing.errors",
        "primitives.tracing.seeds",
        "primitives.tracing.torch_private",
        "primitives.tracing.trace_errors",
        "primitives.tracing.lines",
        "primitives.tracing.watching",
    ),
    ("primitives.testing",),
    ("primitives.ops",),
    (
        "primitives.checks",
        "primitives._batch_norm",
        "primitives.functional",
        "primitives._override",
    ),
    ("primitives.nn", "primitives.tracing"),
)
# What the package itself and its command line say about it may come from anywhere.
TOP = ("primitives", "primitives.__main__", "primitives._version")
THIRD_PARTY = {"primitives": {"torch", "optree"}, "triton_kernels": {"torch", "triton"}}


def module_name(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


@functools.cache
def tree(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports(node, *, at_import=False):
    """Names that are imported anywhere in a module; `at_import`: only those that importing the module imports."""
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES else child.module for name in names)
        else:
            yield from imports(child, at_import=at_import)


def within(module, prefix):
    return module == prefix or module.startswith(f"{prefix}.")


def layer(module):
    for rank, prefixes in enumerate(LAYERS):
        if any(within(module, prefix) for prefix in prefixes):
            return rank
    return len(LAYERS) if module in TOP else None


def test_every_module_has_a_layer():
    assert MODULES
    assert [m for m in MODULES if within(m, "primitives") and layer(m) is None] == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    package = module.split(".")[0]
    allowed = THIRD_PARTY[package] | sys.stdlib_module_names | {package}
    for name in imports(tree(MODULES[module])):
        assert name.split(".")[0] in allowed, f"{module} imports {name}"
        if package == "primitives" and within(name, "primitives"):
            assert layer(name) is not None, f"{module} imports {name}, which is in no layer"
            assert layer(name) <= layer(module), f"{module} imports {name}, which lies above it"


def test_no_cycles():
    graph = {
        m: {n for n in imports(tree(path), at_import=True) if n in MODULES and n != m} for m, path in MODULES.items()
    }
    # A package's __init__ collects its modules, so an import of the package by one of them would be a cycle too.
    done: set[str] = set()

    def visit(module, chain):
        assert module not in chain, f"import cycle: {' -> '.join([*chain, module])}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, [*chain, module])
            done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, "primitives")])
def test_kernels_are_imported_lazily_and_only_in_kernel_bindings(module):
    source = tree(MODULES[module])
    assert not any(within(name, other) for name in imports(source) for other in ("triton", "triton_kernels"))
    if module in ("primitives.core.backend", "primitives.ops._shared"):
        return
    bindings = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.FunctionDef) and any(".def_kernel(" in ast.unparse(d) for d in node.decorator_list)
    ]
    inside = sum(isinstance(n, ast.Name) and n.id == "triton_kernels_module" for b in bindings for n in ast.walk(b))
    everywhere = sum(isinstance(n, ast.Name) and n.id == "triton_kernels_module" for n in ast.walk(source))
    if module != "primitives.__main__":
        assert inside == everywhere
    assert within(module, "primitives.ops") or not bindings


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_files_are_short(path):
    count = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert count <= MAX_LINES, f"{path} has {count} lines"


def test_one_place_builds_an_autograd_function():
    builders = [
        path.as_posix()
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and any(re.search(r"\w*Function$", ast.unparse(base)) for base in node.bases)
    ]
    # A checkpoint differentiates functions, not operators: it needs the public class, with all of its levels.
    assert builders == ["primitives/core/autograd.py", "primitives/func/_checkpoint.py"]
    mentions = [
        p.as_posix()
        for p in SOURCES
        if re.search(r"torch\.autograd\.Function\b|once_differentiable", (ROOT / p).read_text())
    ]
    assert mentions == builders[1:]


# Primitives.

OURS = {name: op for name, op in registered_primitives().items() if name.startswith("primitives::")}


def test_the_families_are_registered():
    for stem in ("layer_norm", "batch_norm", "batch_norm_eval", "log_softmax"):
        assert {f"primitives::{stem}", f"primitives::{stem}_bwd", f"primitives::{stem}_jvp"} <= set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_primitives_are_complete(name):
    op = OURS[name]
    assert op.has_rule("reference")
    assert "cuda" in op.rules.kernels
    assert op.has_rule("vmap"), "the batch folds into the kernel's own rows or channels"
    assert (op.has_rule("vjp") and op.has_rule("jvp")) or op.rules.decomposable
    for statistic in op.spec.statistics:
        assert statistic in op.rules.layouts[0].fields, "the tangent of a statistic could not be refused"


@pytest.mark.parametrize("name", OURS)
def test_references_and_rules_have_the_arguments_of_the_schema(name):
    op = OURS[name]
    assert list(inspect.signature(op.rule("reference")).parameters) == list(op.spec.arguments)


@pytest.mark.parametrize("name", OURS)
def test_one_stem_per_family(name):
    stem = name.split("::")[1].removesuffix("_jvp").removesuffix("_bwd").removesuffix("_pairing")
    assert (ROOT / "primitives" / "ops" / f"{stem}.py").exists()
    assert (ROOT / "triton_kernels" / f"{stem.removesuffix('_eval')}.py").exists()


# Launch policy.


@functools.cache
def kernel_constants():
    """Names that a module of the kernels gives to a number, the planner's included."""
    paths = [path for path in SOURCES if path.parts[0] == "triton_kernels"]
    bodies = [[node for node in tree(path).body if isinstance(node, (ast.Assign, ast.AnnAssign))] for path in paths]
    return frozenset().union(*(named_numbers(ast.Module(body, [])) for body in bodies))


LAUNCHERS = [path for path in SOURCES if path.parts[0] == "triton_kernels" and path.parts[1] != "launch"]


@pytest.mark.parametrize(
    "source",
    [
        "kernel[grid](x, num_warps=4)", "BLOCK_COLS = 128", "block_rows: int = 32", "Config({'BLOCK_ROWS': 64})",
        "def kernel(x, BLOCK_COLS: tl.constexpr = 128): pass", "def launch(*, num_stages=3): pass",
        "kernel[grid](x, LOOP_STAGES=2)", "kernel[grid](x, num_ctas=4)", "kernel[grid](x, BLOCK=1024)",
        "kernel[grid](x, num_warps=2 * 4)", "kernel[grid](x, num_warps=max(4, n))", "BLOCK_ROWS = 8 if n > m else n",
        "kernel[grid](x, num_warps=max(plan.num_warps, 8))", "flags['num_warps'] = 4", "plan.num_warps = 4",
        "x = tl.arange(0, 64)", "x = tl.zeros([BLOCK_ROWS, 64], dtype)", "WARPS = 4; kernel[grid](x, num_warps=WARPS)",
        "def launch(): n = 4; kernel[grid](x, num_warps=n)", "A = 2; B = A * A; block_cols = B", "num_warps *= 2",
        "flags.setdefault('num_warps', 4)", "rows, num_warps = 1, 4", "num_warps, num_stages = choose(4)",
        "def _num_warps(n): return 4", "kernel[grid](x, BLOCK_COLS=LINE)", "kernel[grid](x, num_splits=n << 2)",
    ],
)  # fmt: skip
def test_fixed_launch_numbers_are_found(source):
    assert fixed_launch_numbers(ast.parse(source), {"LINE"})


@pytest.mark.parametrize(
    "source",
    [
        "kernel[grid](x, num_warps=plan.num_warps, BLOCK_SPLITS=1)", "NUM_CHANNELS = sizes[2]", "BLOCK_COLS = sizes[2]",
        "x = tl.arange(0, BLOCK // 4)", "x = tl.zeros([BLOCK_ROWS, 1], dtype)", "kernel[grid](x, 64, EPS=2)",
    ],
)  # fmt: skip
def test_numbers_of_the_plan_are_free(source):
    assert not fixed_launch_numbers(ast.parse(source), {"LINE"})


@pytest.mark.parametrize("path", LAUNCHERS, ids=str)
def test_launch_numbers_are_in_the_launch_package_only(path):
    assert fixed_launch_numbers(tree(path), kernel_constants()) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[:2] != ("triton_kernels", "launch")], ids=str)
def test_nobody_else_chooses_options(path):
    assert fixed_launch_numbers(tree(path), policy=OPTIONS) == []
    # An `autotune` of a single configuration is how options reach a kernel in a graph.
    if path.name != "_kernel.py":
        assert "autotune" not in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] == "triton_kernels"], ids=str)
def test_launchers_raise_and_never_assert(path):
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree(path)))


# Documentation.


def public(body):
    """What is public in a body; the docstring of an overloaded function is in its last definition."""
    found = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
    return [n for n in found if "overload" not in map(ast.unparse, n.decorator_list)]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_everything_public_has_a_docstring(path):
    source = tree(path)
    assert ast.get_docstring(source)
    missing = []
    # What a private module defines is private too; its place in the file is its documentation.
    private = path.name.startswith("_") and not path.name.startswith("__")
    for node in [] if private else public(source.body):
        members = public(node.body) if isinstance(node, ast.ClassDef) else []
        missing += [n.name for n in (node, *members) if not ast.get_docstring(n)]
    kernels = [n for n in ast.walk(source) if isinstance(n, ast.FunctionDef) and n.name.endswith("_kernel")]
    jitted = [n for n in kernels if any("jit" in ast.unparse(d) for d in n.decorator_list)]
    missing += [n.name for n in jitted if not ast.get_docstring(n) and not all(isinstance(s, ast.Pass) for s in n.body)]
    assert missing == []


def api():
    for space in (pr, pr.functional, pr.nn):
        for name in space.__all__:
            value = getattr(space, name)
            if inspect.isfunction(value) or value is pr.use_backend:
                yield value


@pytest.mark.parametrize("function", [*api()], ids=lambda f: f.__name__)
def test_public_functions_document_arguments_results_and_errors(function):
    doc, signature = inspect.getdoc(function), inspect.signature(function)
    shared = re.search(r"The arguments.* are those of `(\w+)`", doc)
    if shared:
        other = getattr(inspect.getmodule(function), shared[1])
        assert inspect.signature(other).parameters == signature.parameters
    elif signature.parameters:
        section = doc.split("Args:\n")[1].split("\n\n")[0]
        assert re.findall(r"^    (\w+): ", section, re.MULTILINE) == list(signature.parameters)
    if signature.parameters:
        assert "\nRaises:\n" in doc
    if inspect.isfunction(function) and signature.parameters:
        assert "\nReturns:\n" in doc


@pytest.mark.parametrize("module", MODULES)
def test_exported_names_exist(module):
    source = tree(MODULES[module])
    if module.startswith("triton_kernels") or module == "primitives.__main__":
        defined = {getattr(n, "name", None) for n in ast.walk(source)} | {
            target.id
            for n in source.body
            if isinstance(n, ast.Assign)
            for target in n.targets
            if isinstance(target, ast.Name)
        }
        exported = [
            ast.literal_eval(n.value)
            for n in source.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ]
        assert all(name in defined for names in exported for name in names)
    else:
        loaded = importlib.import_module(module)
        assert all(hasattr(loaded, name) for name in getattr(loaded, "__all__", ()))
        assert list(getattr(loaded, "__all__", ())) == sorted(getattr(loaded, "__all__", ()))


def test_the_package_is_typed_and_versioned():
    assert (ROOT / "primitives" / "py.typed").exists()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", pr.__version__)
