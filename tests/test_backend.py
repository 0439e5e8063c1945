"""Choosing the backend, and life without Triton or with another project's triton_kernels."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import primitives as pr
from primitives.core import backend

ROOT = pathlib.Path(pr.__file__).resolve().parent.parent
X = torch.tensor([[1.0, 3.0], [2.0, 6.0]])
INVALID = "{}: the backend must be one of auto, triton, reference, got {!r}."
NEEDS_INTERPRETER = (
    '{}: the backend is "triton" and the tensors are on the CPU, where Triton kernels only run in Triton\'s '
    'interpreter. Set TRITON_INTERPRET=1 before triton is imported, or use the backend "auto" or "reference".'
)
NOT_INSTALLED = (
    "Triton kernels were asked for, but {!r} is not installed. Install it (pip install triton, Linux only), or choose "
    'the plain-torch implementation: primitives.use_backend("reference").'
)
FOREIGN = (
    "The import name 'triton_kernels' belongs to another project here (found at {}): remove that one from the "
    "environment, or put torch-training-primitives before it on sys.path."
)
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def python(code, *, path=(), **environment):
    """Run `code` in a fresh interpreter; its standard output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PRIMITIVES_", "TRITON_"))}
    joined = os.pathsep.join([*map(str, path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": joined, "OMP_NUM_THREADS": "1", **environment},
        cwd=path[0] if path else ROOT.anchor,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"


def fresh_backend(monkeypatch, value):
    """The backend module as a process started with PRIMITIVES_BACKEND=value sees it."""
    if value is None:
        monkeypatch.delenv("PRIMITIVES_BACKEND", raising=False)
    else:
        monkeypatch.setenv("PRIMITIVES_BACKEND", value)
    spec = importlib.util.spec_from_file_location("fresh_backend", backend.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _backend_is_left_as_found():
    before = pr.current_backend()
    yield
    assert pr.current_backend() == before


# The setting.


@pytest.mark.parametrize(
    "value, expected",
    [(None, "auto"), ("", "auto"), ("auto", "auto"), ("triton", "triton"), ("reference", "reference")],
)
def test_environment_variable(monkeypatch, value, expected):
    assert fresh_backend(monkeypatch, value).current_backend() == expected


@pytest.mark.parametrize("value", ["cuda", "Triton", " auto"])
def test_an_invalid_environment_variable_is_an_error(monkeypatch, value):
    with pytest.raises(ValueError, match="PRIMITIVES_BACKEND") as caught:
        fresh_backend(monkeypatch, value)
    assert str(caught.value) == INVALID.format("PRIMITIVES_BACKEND", value)


def test_an_invalid_environment_variable_stops_the_import():
    assert INVALID.format("PRIMITIVES_BACKEND", "cuda") in python("import primitives", PRIMITIVES_BACKEND="cuda")


@pytest.mark.parametrize("name", ["cuda", "", None, "AUTO"])
def test_use_backend_checks_the_name_before_it_is_entered(name):
    with pytest.raises(ValueError, match="use_backend") as caught:
        pr.use_backend(name)
    assert str(caught.value) == INVALID.format("use_backend", name)


def test_use_backend_nests_and_restores():
    outer = pr.current_backend()
    with pr.use_backend("reference"):
        with pr.use_backend("triton"):
            assert pr.current_backend() == "triton"
            with pr.use_backend("auto"):
                assert pr.current_backend() == "auto"
            assert pr.current_backend() == "triton"
        assert pr.current_backend() == "reference"
    assert pr.current_backend() == outer


def test_use_backend_restores_after_an_error():
    outer = pr.current_backend()
    with pytest.raises(KeyError), pr.use_backend("triton"):
        raise KeyError
    assert pr.current_backend() == outer


def test_one_use_backend_can_be_entered_again():
    context, outer = pr.use_backend("reference"), pr.current_backend()
    with context, pr.use_backend("triton"), context:
        assert pr.current_backend() == "reference"
    assert pr.current_backend() == outer


def test_use_backend_as_a_decorator():
    @pr.use_backend("reference")
    def inner(depth):
        """Doc."""
        assert pr.current_backend() == "reference"
        with pr.use_backend("auto"):
            return inner(depth - 1) if depth else pr.current_backend()

    outer = pr.current_backend()
    assert inner(2) == "auto"
    assert (inner.__name__, inner.__doc__) == ("inner", "Doc.")
    assert pr.current_backend() == outer


def test_the_backward_pass_follows_the_setting_in_force_when_it_runs(monkeypatch):
    from primitives.ops.layer_norm import layer_norm_bwd_p

    calls = []

    def kernel(*args):
        calls.append("kernel")
        return layer_norm_bwd_p.rule("reference")(*args)

    x = X.clone().requires_grad_()
    y = pr.functional.layer_norm(x, (2,))
    monkeypatch.setattr(backend, "require_interpreter", calls.append)
    monkeypatch.setitem(layer_norm_bwd_p.rules.kernels, "cuda", kernel)
    layer_norm_bwd_p.rules._choose_implementations()
    try:
        with pr.use_backend("triton"):
            y.sum().backward()
    finally:
        monkeypatch.undo()
        layer_norm_bwd_p.rules._choose_implementations()
    assert calls == ["layer_norm_bwd", "kernel"]


# Triton.


def test_triton_is_imported_when_it_is_asked_for_and_needs_the_interpreter_on_the_cpu():
    printed = python("""
        import sys
        import primitives as pr

        def loaded():
            return sorted({name.split(".")[0] for name in sys.modules} & {"triton", "triton_kernels"})

        print(loaded())
        import torch
        model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4), torch.nn.LogSoftmax(1))
        pr.nn.convert(model)
        x = torch.randn(3, 4)
        model(x).sum().backward()
        torch.func.jvp(model, (x,), (x,))
        print(loaded())
        state = torch.zeros(4), torch.ones(4)
        for call in (
            lambda: pr.functional.layer_norm(x, (4,)),
            lambda: pr.functional.log_softmax(x, 1),
            lambda: pr.functional.batch_norm(x, *state, training=True),
            lambda: pr.functional.batch_norm(x, *state),
        ):
            call()
            with pr.use_backend("triton"):
                try:
                    call()
                except pr.BackendError as error:
                    print(error)
        print([t._version for t in state])
    """)
    names = ("layer_norm", "log_softmax", "batch_norm", "batch_norm_eval")
    errors = [NEEDS_INTERPRETER.format(name) if HAS_TRITON else NOT_INSTALLED.format("triton") for name in names]
    assert printed.splitlines() == ["[]", "[]", *errors, "[1, 1]"]


@needs_triton
def test_the_interpreter_runs_the_kernels():
    printed = python(
        """
        import torch
        import primitives as pr
        x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        results = []
        for name in ("triton", "reference"):
            with pr.use_backend(name):
                y = pr.functional.layer_norm(x, (5,))
                results.append((y, *torch.autograd.grad(y.sin().sum(), x)))
        torch.testing.assert_close(*results)
        import triton_kernels._kernel
        print(triton_kernels._kernel.INTERPRETED)
        """,
        TRITON_INTERPRET="1",
    )
    assert printed == "True\n"


def test_the_reference_works_where_triton_is_not_installed():
    printed = python("""
        import importlib.abc, sys

        class Blocked(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocked())
        import torch
        import primitives as pr
        x = torch.randn(3, 4, requires_grad=True)
        pr.functional.layer_norm(x, (4,)).sum().backward()
        model = torch.nn.BatchNorm1d(4)
        pr.nn.convert(model)
        torch.func.jvp(model, (x.detach(),), (x.detach(),))
        with pr.use_backend("reference"):
            print(pr.functional.log_softmax(x, 1).shape)
        for _ in range(2):
            try:
                with pr.use_backend("triton"):
                    pr.functional.log_softmax(x.detach(), 1)
            except pr.BackendError as error:
                print(error)
    """)
    assert printed.splitlines() == ["torch.Size([3, 4])"] + [NOT_INSTALLED.format("triton")] * 2


def test_missing_kernels_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_kernels", None)
    with pytest.raises(pr.BackendError) as caught:
        backend.triton_kernels_module("layer_norm")
    assert str(caught.value) == NOT_INSTALLED.format("triton_kernels")


def test_another_projects_triton_kernels_is_told_apart(tmp_path):
    package = tmp_path / "triton_kernels" / "__init__.py"
    package.parent.mkdir()
    package.write_text("from triton_kernels import matmul_ogs\n__version__ = '1.0'\n")
    (package.parent / "matmul_ogs.py").write_text("")
    (package.parent / "layer_norm.py").write_text("raise AssertionError('the foreign module was imported')")
    printed = python(
        """
        import torch
        import primitives as pr
        for _ in range(2):
            try:
                pr.functional.layer_norm(torch.ones(2, 3), (3,))
            except pr.BackendError as error:
                print(error)
        with pr.use_backend("auto"):
            print(pr.functional.layer_norm(torch.ones(2, 3), (3,)).shape)
        """,
        path=[tmp_path],
        PRIMITIVES_BACKEND="triton",
    )
    assert printed.splitlines() == [FOREIGN.format(package)] * 2 + ["torch.Size([2, 3])"]


@pytest.mark.parametrize("kind", ["package", "namespace", "bare"])
def test_other_kinds_of_foreign_packages(monkeypatch, kind):
    foreign = types.ModuleType("triton_kernels")
    if kind == "package":
        foreign.__file__, foreign.DISTRIBUTION = "/elsewhere/triton_kernels/__init__.py", "another"
    elif kind == "namespace":
        foreign.__file__, foreign.__path__ = None, ["/elsewhere/triton_kernels"]
    monkeypatch.setitem(sys.modules, "triton_kernels", foreign)
    where = {"package": "/elsewhere/triton_kernels/__init__.py", "namespace": "/elsewhere/triton_kernels"}
    with pytest.raises(pr.BackendError) as caught:
        backend.triton_kernels_module("layer_norm")
    assert str(caught.value) == FOREIGN.format(where.get(kind, "an unknown place"))


@needs_triton
def test_a_missing_module_of_our_own_is_no_missing_triton():
    with pytest.raises(ModuleNotFoundError, match="no_such_family"):
        backend.triton_kernels_module("no_such_family")


def test_the_backend_does_not_change_inside_a_compiled_function():
    def inside(x):
        with pr.use_backend("reference"):
            return pr.functional.log_softmax(x, 0)

    with pytest.raises(Exception, match="the backend cannot change inside a compiled function"):
        torch.compile(inside, backend="eager", fullgraph=True)(torch.zeros(3))
