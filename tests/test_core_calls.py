"""The front end around a call: batching, autocast, backends, memory, threads, writing into the caller's tensors."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives.core import Primitive, to_front
from primitives.core.write_back import write_back

NAMESPACE = "primitives_test_calls"
numbers = itertools.count()


def define(schema="(Tensor x) -> Tensor y", *, rules=None, **options):
    op = Primitive(f"op{next(numbers)}", schema, namespace=NAMESPACE, **options)
    for kind, rule in (rules or {}).items():
        getattr(op, f"def_{kind}")(rule)
    return op


def cube_rules():
    return {
        "reference": lambda x: x.pow(3.0),
        "vjp": lambda r, c, wanted: {"x": 3.0 * r.x.square() * c.y},
        "jvp": lambda r, t: 3.0 * r.x.square() * t.x,
    }


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Batching.


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (1, 0), (2, -1)], ids=str)
def test_default_vmap_with_one_output(axes):
    op = define("(Tensor x, Tensor w) -> Tensor y", rules={"reference": lambda x, w: (x.unsqueeze(-1) * w).cumsum(0)})
    x, w = (data(3, 3, 3, seed=i) if axis is not None else data(3, 3, seed=i) for i, axis in enumerate(axes))
    ours = vmap(op, axes)(x, w)
    assert_close(ours, vmap(lambda x, w: (x.unsqueeze(-1) * w).cumsum(0), axes)(x, w))


def test_default_vmap_with_several_outputs_nested_and_differentiated():
    op = define(
        "(Tensor x, Tensor? w, float s) -> (Tensor a, Tensor b)",
        rules={"reference": lambda x, w, s: (x * s, x.sin().sum() * (1.0 if w is None else w))},
        decomposable=True,
    )
    a, b = vmap(lambda x: op(x, None, 2.0))(data(4, 3))
    assert_close((a, b), (2 * data(4, 3), data(4, 3).sin().sum(1)))
    _, b = vmap(vmap(lambda x, w: op(x, w, 2.0), (0, None)))(data(2, 4, 3), data(2, seed=1))
    assert_close(b, data(2, 4, 3).sin().sum(2) * data(2, seed=1)[:, None])
    assert_close(vmap(grad(lambda x: op(x, None, 2.0)[1]))(data(4, 3)), data(4, 3).cos())
    assert_close(grad(lambda x: vmap(lambda x: op(x, None, 2.0)[1])(x).sum())(data(4, 3)), data(4, 3).cos())


def test_own_vmap_rule_gets_sizes_axes_and_arguments_by_name():
    seen = []

    def rule(batch, primals):
        seen.append(
            (
                batch.size,
                batch.axes,
                batch.is_batched("x"),
                batch.is_batched("w"),
                batch.is_batched("w", "x"),
                primals.s,
            )
        )
        return to_front(primals.x, batch.axes.x, batch.size) * primals.s, 0

    op = define("(Tensor x, Tensor? w, float s) -> Tensor y", rules={"reference": lambda x, w, s: x * s, "vmap": rule})
    assert_close(vmap(lambda x: op(x, None, 3.0), 1, 1)(data(2, 5)), 3 * data(2, 5))
    assert seen == [(5, (1, None, None), True, False, True, 3.0)]


def test_to_front_expands_what_has_no_batch_axis():
    x = data(2, 3)
    assert to_front(None, None, 4) is None
    assert torch.equal(to_front(x, 1, 3), x.T)
    expanded = to_front(x, None, 4)
    assert expanded.shape == (4, 2, 3)
    assert expanded.stride(0) == 0
    assert expanded.data_ptr() == x.data_ptr()


# Autocast and kernels.


def test_autocast_rule_runs_under_autocast_only():
    seen = []

    def rule(primals):
        seen.append(primals.x.dtype)
        return primals._replace(x=primals.x.bfloat16())

    op = define(rules=cube_rules(), residuals=("x",))
    assert op.def_autocast("cpu")(rule) is rule
    x = torch.ones(3, requires_grad=True)
    assert op(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x)
        assert seen == [torch.float32]
        with torch.autocast("cpu", enabled=False):
            assert op(x).dtype == torch.float32
        assert jvp(op, (torch.ones(3),), (torch.ones(3),))[1].dtype == torch.bfloat16
        assert vmap(grad(op))(torch.ones(3)).dtype == torch.float32
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert_close(x.grad, torch.full((3,), 3.0))


def test_without_a_rule_autocast_changes_nothing():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert define(rules=cube_rules())(torch.ones(3)).dtype == torch.float32


def test_kernels_and_backends():
    op = define(rules={"reference": lambda x: x * 1})
    assert torch.equal(op(data(3)), data(3))
    op.def_kernel("cpu")(lambda x: x * 2)
    assert torch.equal(op(data(3)), 2 * data(3))
    with pr.use_backend("reference"):
        assert torch.equal(op(data(3)), data(3))
    # Without a "cuda" kernel there is nothing for the interpreter to run.
    with pr.use_backend("triton"):
        assert torch.equal(op(data(3)), data(3))
    op.def_kernel("cuda")(lambda x: x * 3)
    with pr.use_backend("auto"):
        assert torch.equal(op(data(3)), 2 * data(3))


# Memory.


def test_a_dtype_can_be_kept_without_its_tensor():
    seen = []

    def rule(residuals, cotangents, wanted):
        seen.append(residuals)
        return {"x": cotangents.y.to(residuals.x_dtype)}

    op = define(
        "(Tensor x, int n) -> Tensor y",
        residuals=("x.dtype",),
        rules={"reference": lambda x, n: x.double(), "vjp": rule},
    )
    x = data(3).float().requires_grad_()
    op(x, 4).sum().backward()
    assert x.grad.dtype == torch.float32
    assert seen[0]._asdict() == {"x_dtype": torch.float32, "n": 4}


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op(data(64)),
        lambda op: op(data(64).requires_grad_()),
        lambda op: op(op(data(64).requires_grad_())),
        lambda op: op(data(64).requires_grad_()).sum().backward(),
        lambda op: torch.autograd.grad(op(x := data(64).requires_grad_()).sum(), x, create_graph=True),
        lambda op: grad(lambda x: op(x).sum())(data(64)),
        lambda op: jacfwd(jacrev(op))(data(4)),
        lambda op: vmap(grad(op))(data(64)),
    ],
    ids=["plain", "grad", "chain", "backward", "double", "func.grad", "jacfwd jacrev", "vmap"],
)
@pytest.mark.parametrize("residuals", [("x",), ("x", "y")], ids=str)
def test_a_call_frees_its_tensors(call, residuals):
    references, rules = [], cube_rules()

    def reference(x):
        y = x.pow(3.0)
        references.extend([weakref.ref(x), weakref.ref(y)])
        return y

    op = define(rules={**rules, "reference": reference}, residuals=residuals, decomposable=True)
    call(op)
    gc.collect()
    references.clear()
    gc.disable()
    try:
        call(op)
        alive = [reference() for reference in references if reference() is not None]
    finally:
        gc.enable()
    assert references
    assert not alive


def test_a_tangent_dies_with_its_level():
    op = define(rules=cube_rules(), residuals=("x",))
    with fwad.dual_level():
        tangent = data(5)
        reference = weakref.ref(tangent)
        y = op(fwad.make_dual(data(5), tangent))
        del tangent
        assert fwad.unpack_dual(y).tangent is not None
    gc.collect()
    assert reference() is None


def test_a_saved_tensor_that_was_written_since_is_refused():
    op, x = define(rules=cube_rules(), residuals=("x",)), data(3).requires_grad_()
    value = x * 1
    y = op(value)
    write_back([value.detach()], [torch.zeros(3).double()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Threads, in reverse mode: torch has one forward-mode level for the whole process, which threads would share.


def run_in_threads(work, count=8):
    errors, barrier = [], threading.Barrier(count)

    def target(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_define_and_call():
    def work(i):
        rules = {
            **cube_rules(),
            "reference": lambda x: x.pow(3.0) + i,
            "vmap": lambda batch, primals: (own(primals.x), 0),
        }
        own = define(rules=rules, residuals=("x",))
        for _ in range(5):
            x = data(6, seed=i).requires_grad_()
            y = own(x)
            assert_close(y, x.pow(3.0) + i)
            y.sum().backward()
            assert_close(x.grad, 3 * x.detach().square())
            assert_close(jacrev(grad(lambda x: own(x).sum()))(x.detach()), torch.diag(6 * x.detach()))

    run_in_threads(work)


def test_threads_call_the_same_primitive():
    op = define(rules={**cube_rules(), "vmap": lambda batch, primals: (op(primals.x), 0)}, residuals=("x",))

    def work(i):
        for _ in range(10):
            x = data(6, seed=i)
            assert_close(grad(lambda x: op(x).sum())(x), 3 * x.square())
            assert_close(jacrev(op)(x), torch.diag(3 * x.square()))

    run_in_threads(work)


# Writing back.


def test_write_back_writes_in_place_and_counts_a_version():
    targets, values = [data(3), data(2, 2)], [data(3, seed=1), data(2, 2, seed=1)]
    pointers = [t.data_ptr() for t in targets]
    write_back(targets, values)
    assert_close(targets, values, rtol=0, atol=0)
    assert [t._version for t in targets] == [1, 1]
    assert [t.data_ptr() for t in targets] == pointers
    values[0].zero_()
    assert targets[0].abs().min() > 0


def test_write_back_under_grad_reaches_what_lies_outside():
    target = torch.zeros(3).double()

    def loss(x):
        y = x.square()
        write_back([target], [y.detach()])
        return y.sum()

    assert_close(grad(loss)(data(3)), 2 * data(3))
    assert_close(target, data(3).square())
    # Tensor.copy_ does not.
    with pytest.raises(RuntimeError, match="captured Tensor"):
        grad(lambda x: (target.copy_(x.detach()), x.sum())[1])(data(3))


@pytest.mark.parametrize("target_axis", [0, 1])
@pytest.mark.parametrize("value_axis", [0, 1, None])
def test_write_back_under_vmap(target_axis, value_axis):
    target, value = data(4, 4), data(4, 4, seed=1) if value_axis is not None else data(4, seed=1)
    vmap(lambda t, v: (write_back([t], [v]), t)[1], (target_axis, value_axis))(target, value)
    expected = value.movedim(value_axis, 0) if value_axis is not None else value.expand(4, 4)
    assert_close(target.movedim(target_axis, 0), expected)
    assert target._version == 1


def test_write_back_under_vmap_refuses_to_lose_samples_and_writes_nothing():
    batched, single = data(4, 3), data(3, seed=1)
    with pytest.raises(RuntimeError, match=r"^vmap: .* has no batch axis\. Use the pure form"):
        vmap(lambda t, v: (write_back([t, single], [v, v]), v)[1])(batched, data(4, 3, seed=2))
    assert_close((batched, single), (data(4, 3), data(3, seed=1)), rtol=0, atol=0)
    vmap(lambda v: (write_back([single], [torch.ones(3).double()]), v)[1])(batched)
    assert torch.equal(single, torch.ones(3).double())


def test_write_back_under_grad_of_vmap():
    target = torch.zeros(4, 3).double()

    def sample_loss(t, x):
        write_back([t], [x.detach() * 2])
        return x.square().sum()

    assert_close(grad(lambda x: vmap(sample_loss)(target, x).sum())(data(4, 3)), 2 * data(4, 3))
    assert_close(target, 2 * data(4, 3))


def test_write_back_when_compiled():
    target = torch.zeros(3).double()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        y = x.square()
        write_back([target], [y.detach()])
        return y.sum() + target.sum()

    x = data(3).requires_grad_()
    for _ in range(2):
        result = step(x)
    result.backward()
    assert_close(result, 2 * x.detach().square().sum())
    assert_close(target, x.detach().square())
    assert_close(x.grad, 2 * x.detach())
