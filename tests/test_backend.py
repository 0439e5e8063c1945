"""Choosing the backend, and life without Triton."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

import primitives as pr
from primitives._core import backend
from primitives.ops.norms.layer_norm import layer_norm_bwd_p
from primitives.tracing import PhiloxState, rng_mode

ROOT = pathlib.Path(pr.__file__).resolve().parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None


def python(*parts):
    """Run the parts of a program in a fresh interpreter; its standard output, or all that it wrote if it fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PRIMITIVES_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(map(textwrap.dedent, parts))],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT.anchor,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("value", [None, "", "triton", "cuda", " auto"])
def test_environment_variable(monkeypatch, value):
    """The backend module as a process that is started with PRIMITIVES_BACKEND=value sees it."""
    monkeypatch.delenv("PRIMITIVES_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("PRIMITIVES_BACKEND", value)
    spec = importlib.util.spec_from_file_location("fresh_backend", backend.__file__)
    module = importlib.util.module_from_spec(spec)
    if value in (None, "", "triton"):
        spec.loader.exec_module(module)
        assert module.current_backend() == (value or "auto")
    else:
        with pytest.raises(ValueError, match=f"^PRIMITIVES_BACKEND: .* auto, triton, reference, got '{value}'"):
            spec.loader.exec_module(module)


def test_use_backend_nests_and_restores():
    outer, context = pr.current_backend(), pr.use_backend("reference")

    @context
    def decorated(depth):
        assert pr.current_backend() == "reference"
        with pr.use_backend("auto"):
            return decorated(depth - 1) if depth else pr.current_backend()

    with context, pr.use_backend("triton"):
        assert decorated(2) == "auto"
        with context, pytest.raises(ZeroDivisionError), pr.use_backend("auto"):
            raise ZeroDivisionError
        assert pr.current_backend() == "triton"
    assert pr.current_backend() == outer
    for name in ("cuda", None):
        with pytest.raises(ValueError, match=r"^use_backend: "):
            pr.use_backend(name)

    def compiled(x):
        with pr.use_backend("reference"):
            return x + 1

    with pytest.raises(Exception, match="the backend cannot change inside a compiled function"):
        torch.compile(compiled, backend="eager", fullgraph=True)(torch.zeros(3))


CONTEXTS = {
    "use_backend": (lambda: pr.use_backend("reference"), pr.current_backend),
    "repair_torch": (pr.repair_torch, pr.is_repaired),
    "rng_mode": (lambda: rng_mode(PhiloxState.from_seed(0)), lambda: torch.rand(2).sum().item()),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_decorate_functions_and_generators(name):
    make, look = CONTEXTS[name]
    with make():
        inside = look()
    context = make()

    @context
    def decorated(depth=1):
        """Recursive, as a context entered twice."""
        if depth:
            decorated(0)
        return look()

    @context
    def generated():
        yield look()
        yield 1

    outside = look()
    assert decorated(depth=0) == inside != outside
    assert decorated() == next(generated()) == inside
    assert decorated.__doc__.startswith("Recursive")
    assert look() != inside

    async def awaits():
        return look()

    with pytest.raises(TypeError, match=f"{name}: the decorated function must not be asynchronous"):
        context(awaits)


@pytest.mark.usefixtures("watched")
def test_the_backward_pass_follows_the_setting_in_force_when_it_runs(monkeypatch):
    calls = []

    def kernel(*args):
        calls.append("kernel")
        return layer_norm_bwd_p.rule("reference")(*args)

    x = torch.ones(2, 2, requires_grad=True)
    y = pr.functional.layer_norm(x, (2,))
    monkeypatch.setitem(layer_norm_bwd_p.rules.implementations["cpu"], "triton", kernel)
    with pr.use_backend("triton"):
        y.sum().backward()
    assert calls == ["kernel"]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_triton_and_sympy_are_imported_when_asked_for_and_kernels_need_the_interpreter_on_the_cpu():
    """Where it is not installed all else works."""
    printed = python("""
        import sys, torch
        import primitives as pr

        model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4), torch.nn.LogSoftmax(1))
        pr.nn.convert(model)
        x, state = torch.randn(3, 4), (torch.zeros(4), torch.ones(4))
        model(x).sum().backward()
        # Torch's own transforms import sympy, which takes most of a second.
        early = [name for name in sys.modules if name.startswith("sympy")]
        torch.func.jvp(model, (x,), (x,))
        print(early + [name for name in sys.modules if name.startswith("triton")])
        for is_installed in (True, False):
            if not is_installed:
                for name in [name for name in sys.modules if name.startswith(("triton", "primitives.kernels"))]:
                    del sys.modules[name]
                sys.modules["triton"] = None
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
        print([bool((t != start).any()) for t, start in zip(state, (0, 1))])
    """)
    first, *errors, last = printed.splitlines()
    assert (first, len(errors), last) == ("[]", 8, "[True, True]"), printed
    assert all("TRITON_INTERPRET=1" in error for error in errors[:4])
    assert all("not installed" in error for error in errors[4:])


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_a_missing_module_of_our_own_is_not_missing_triton():
    with pytest.raises(ModuleNotFoundError, match="no_such_family"):
        backend.triton_kernels_module("no_such_family")
