"""The decomposition tables: values against ATen, derivatives against differences, registration, use, graphs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from primitives._core import Primitive
from primitives._core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    get_decomposition,
    register_decomposition,
    register_decomposition_for_jvp,
)
from primitives._core.errors import MissingRuleError
from primitives.decompositions import decomposition_graph
from tests.support import DOUBLE, plain_layer_norm, randn

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


def leaf(*shape):
    return randn(*shape).requires_grad_()


def nll(shape, reduction, weighted, ignored=-100):
    axis = min(len(shape) - 1, 1)
    target = torch.randint(0, shape[axis], shape[:axis] + shape[axis + 1 :])
    if target.dim():
        target.view(-1)[0] = ignored
    weight = torch.rand(shape[axis], **DOUBLE) if weighted else None
    return F.nll_loss(leaf(*shape).log_softmax(axis), target, weight, reduction=reduction, ignore_index=ignored)


def running():
    return randn(3), torch.rand(3, **DOUBLE) + 0.5


# Calls whose forward and backward passes run the operators of the table, with arguments as ATen makes them.
CALLS = {
    "trace": lambda: torch.trace(leaf(3, 4)),
    "log_sigmoid": lambda: F.logsigmoid(leaf(7) * 30),
    "log_softmax": lambda: leaf(3, 4).log_softmax(1),
    "softmax": lambda: leaf(3, 4).softmax(0),
    "mse_loss": lambda: F.mse_loss(leaf(3, 4), leaf(3, 4)),
    "mse_loss, sum": lambda: F.mse_loss(leaf(3, 4), leaf(3, 4), reduction="sum"),
    "nll of a vector": lambda: nll((4,), "mean", True),
    "nll": lambda: nll((3, 4), "none", False),
    "nll, mean": lambda: nll((3, 4), "mean", True),
    "nll, sum": lambda: nll((3, 4), "sum", True),
    "nll of images": lambda: nll((2, 4, 2, 3), "none", True),
    "nll of images, mean": lambda: nll((2, 4, 2, 3), "mean", False, ignored=3),
    "layer norm": lambda: F.layer_norm(leaf(2, 4, 3), (3,), leaf(3), leaf(3), 1e-2),
    "layer norm, x": lambda: F.layer_norm(leaf(2, 4, 3), (4, 3), eps=1e-2),
    "layer norm, bias": lambda: F.layer_norm(randn(2, 4, 3), (3,), randn(3), leaf(3), 1e-2),
    "group norm": lambda: F.group_norm(leaf(2, 4, 3, 2), 2, leaf(4), leaf(4), 1e-2),
    "group norm, x": lambda: F.group_norm(leaf(2, 4, 3), 2, eps=1e-2),
    "weight norm": lambda: torch._weight_norm(leaf(4, 3), leaf(4, 1), 0),
    "batch norm": lambda: F.batch_norm(leaf(5, 3, 2), None, None, leaf(3), leaf(3), True, eps=1e-2),
    "batch norm, x": lambda: F.batch_norm(leaf(5, 3, 2), None, None, training=True, eps=1e-2),
    "batch norm, weight": lambda: F.batch_norm(randn(5, 3, 2), None, None, leaf(3), randn(3), True, eps=1e-2),
    "batch norm, evaluation": lambda: F.batch_norm(leaf(5, 3, 2), *running(), leaf(3), leaf(3), eps=1e-2),
    **{
        name: lambda name=name, args=args: getattr(aten, name)(leaf(5, 3, 2), leaf(3), leaf(3), *running(), *args)[0]
        for name, args in {
            "_native_batch_norm_legit": (True, 0.2, 1e-2),
            "_native_batch_norm_legit_functional": (True, 0.2, 1e-2),
            "_native_batch_norm_legit_no_training": (0.2, 1e-2),
            "_batch_norm_with_update": (0.2, 1e-2),
            "_batch_norm_with_update_functional": (0.2, 1e-2),
            "_batch_norm_no_update": (0.2, 1e-2),
        }.items()
    },
    "batch norm, evaluation, x": lambda: F.batch_norm(leaf(5, 3, 2), *running(), eps=1e-2),
}


class Recorder(TorchDispatchMode):
    """The calls of operators that have a decomposition."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in decomposition_table:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(name):
    with Recorder() as recorder:
        y = CALLS[name]()
        y.backward(torch.randn_like(y))
    assert recorder.calls
    return recorder.calls


def tensors(result):
    return [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t is not None]


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_aten(name):
    for op, args, kwargs in recorded(name):
        results = []
        for function in (op, get_decomposition(op)):
            given = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            outputs = function(*given, **kwargs)
            # Also what is written in place.
            results.append([*(outputs if isinstance(outputs, tuple) else [outputs]), *given])
        # ATen may have a cotangent for a parameter that is not there.
        pairs = [pair for pair in zip(*results, strict=True) if isinstance(pair[1], torch.Tensor)]
        torch.testing.assert_close(*zip(*pairs, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_are_right_in_both_modes(name):
    for op, args, kwargs in recorded(name):
        if op is aten.native_layer_norm_backward.default:
            # Given rstd it takes eps for what is left of it, so moving x alone moves eps: the next test stands in.
            continue
        is_backward = "backward" in str(op)
        places = (0, 1) if is_backward else [i for i, a in enumerate(args) if getattr(a, "requires_grad", False)]

        def function(*active, op=op, args=args, kwargs=kwargs, places=places):
            given = dict(zip(places, active, strict=True))
            result = get_decomposition(op)(*[given.get(i, a) for i, a in enumerate(args)], **kwargs)
            return tuple(t for t in tensors(result) if t.numel())

        active = [args[i].detach().clone().requires_grad_() for i in places]
        if active:
            assert torch.autograd.gradcheck(function, active, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("nesting", list(itertools.product([jacfwd, jacrev], repeat=2)), ids=lambda n: n[0].__name__)
def test_the_backward_of_layer_norm_differentiates_through_its_statistics(nesting):
    y_bar, x = randn(2, 3), randn(2, 3)

    def by_decomposition(x):
        _, mean, rstd = aten.native_layer_norm(x, [3], None, None, 1e-2)
        args = (y_bar, x, [3], mean, rstd, None, None, (True, False, False))
        return (get_decomposition(aten.native_layer_norm_backward.default)(*args)[0] ** 2).sum()

    def by_formula(x):
        return (torch.func.vjp(plain_layer_norm, x)[1](y_bar)[0] ** 2).sum()

    ours, truth = by_decomposition, by_formula
    for transform in nesting:
        ours, truth = transform(ours), transform(truth)
    torch.testing.assert_close(ours(x), truth(x))


def test_the_backends_batch_norms_are_the_native_one():
    x, y_bar, weight, mask = randn(5, 3, 2), randn(5, 3, 2), randn(3), (True, True, True)
    rest = weight, *running(), x.mean((0, 2)), (x.var((0, 2), unbiased=False) + 1e-2).rsqrt()
    native, cudnn, miopen = (
        get_decomposition(getattr(aten, f"{name}_batch_norm_backward").default)
        for name in ("native", "cudnn", "miopen")
    )
    expected = native(y_bar, x, *rest, True, 1e-2, mask)
    torch.testing.assert_close(cudnn(x, y_bar, *rest, 1e-2, torch.empty(0, dtype=torch.uint8)), expected)
    torch.testing.assert_close(miopen(x, y_bar, *rest, 1e-2), expected)


def test_empty_inputs():
    """Zeros of the right shapes, and for rows without elements the statistics of ATen."""
    x, weight = torch.zeros(0, 3, **DOUBLE), torch.ones(3, **DOUBLE)
    empty, mask = torch.zeros(0, 1, **DOUBLE), (True, True, True)
    for op, args in (
        (aten.native_layer_norm_backward.default, (x, x, [3], empty, empty, weight, weight, mask)),
        (aten.native_batch_norm_backward.default, (x, x, *[weight] * 5, True, 1e-5, mask)),
    ):
        torch.testing.assert_close(get_decomposition(op)(*args), (x, *[torch.zeros_like(weight)] * 2))
    op, args = aten.native_layer_norm.default, (torch.zeros(4, 0), [0], None, None, 1e-5)
    torch.testing.assert_close(get_decomposition(op)(*args), op(*args), equal_nan=True)


@pytest.mark.parametrize("parameter_dtype", [None, torch.float16, torch.float32])
def test_statistics_have_the_dtype_of_aten(parameter_dtype):
    x = torch.randn(4, 3).half()
    weight, mean, var = (None if parameter_dtype is None else torch.ones(3, dtype=parameter_dtype) for _ in range(3))
    for op, args in (
        (aten.native_layer_norm.default, (x, [3], weight, None, 1e-5)),
        (aten.native_batch_norm.default, (x, weight, None, mean, var, True, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (x, weight, weight, None, None, True, 0.1, 1e-5)),
    ):
        assert [t.dtype for t in get_decomposition(op)(*args)] == [t.dtype for t in op(*args)]


def test_labels_may_be_bytes():
    x = randn(3, 200).log_softmax(1)
    target = torch.tensor([1, 156, 199], dtype=torch.uint8)
    # -100, the label to ignore, is 156 as a byte, which is a label like any other.
    args = torch.ones(3, **DOUBLE), x, target, None, 0, -100, torch.tensor(3.0, **DOUBLE)
    torch.testing.assert_close(get_decomposition(aten.nll_loss_backward)(*args), aten.nll_loss_backward(*args))


@pytest.fixture
def scratch_op():
    library = torch.library.Library("decomposition_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.define("double.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    yield torch.ops.decomposition_test.double
    for overload in ("default", "out"):
        for table in (decomposition_table, decomposition_table_for_jvp):
            table.pop(getattr(torch.ops.decomposition_test.double, overload), None)
    library._destroy()


def test_registering_an_operator_registers_its_overloads_but_those_with_out(scratch_op):
    double = register_decomposition(scratch_op)(lambda x: x + x)
    assert get_decomposition(scratch_op) is double
    assert scratch_op.out not in decomposition_table
    with pytest.raises(TypeError, match="out= arguments"):
        register_decomposition(scratch_op.out)
    with pytest.raises(MissingRuleError):
        get_decomposition(scratch_op.out)


def test_registering_twice_raises_unless_tolerated(scratch_op):
    register_decomposition(scratch_op.default)(lambda x: x + x)
    with pytest.raises(ValueError, match=r"double\.default already has"):
        register_decomposition([aten.trace, scratch_op])(lambda x: x * 2)
    general = register_decomposition(scratch_op, allow_existing=True)(lambda x: x * 2)
    assert get_decomposition(scratch_op.default, for_jvp=True) is general
    special = register_decomposition_for_jvp(scratch_op.default)(lambda x: 2 * x)
    assert get_decomposition(scratch_op.default, for_jvp=True) is special
    assert get_decomposition(scratch_op.default) is general


def test_what_is_missing_is_named(scratch_op):
    for for_jvp, named in ((False, r"double\.default"), (True, "register_decomposition_for_jvp")):
        with pytest.raises(MissingRuleError, match=named):
            get_decomposition(scratch_op.default, for_jvp=for_jvp)
    for function in (register_decomposition, register_decomposition_for_jvp, get_decomposition):
        with pytest.raises(TypeError, match=function.__name__):
            function("aten::trace")


def test_core_uses_the_tables_where_a_rule_is_missing():
    op = Primitive("tabled", "(Tensor x) -> Tensor y", namespace="decomposition_test_core")
    op.def_reference(lambda x: x**3)
    x = torch.tensor([2.0], **DOUBLE)
    with pytest.raises(MissingRuleError, match="no vjp rule and no decomposition"):
        grad(lambda x: op(x).sum())(x)
    register_decomposition(op)(lambda x: x * x * x)
    assert grad(lambda x: op(x).sum())(x).item() == 12.0
    register_decomposition_for_jvp(op)(lambda x: x**3 + 0 * x)
    assert jvp(op, (x,), (torch.ones_like(x),))[1].item() == 12.0
    assert jacfwd(jacrev(lambda x: op(x).sum()))(x).item() == 12.0


INSIDE = {
    "grad": lambda f, x: grad(f)(x),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (x,)))(x.expand(2, 3, 3)),
    "autocast": lambda f, x: torch.autocast("cpu")(f)(x),
}


@pytest.mark.parametrize("transform", INSIDE)
def test_a_graph_asked_for_inside_a_transform_is_the_one_outside(transform, scratch_op):
    register_decomposition(scratch_op)(lambda x: x @ x)
    graphs, x = [], torch.eye(3)
    INSIDE[transform](lambda x: graphs.append(decomposition_graph(scratch_op.default, x)) or x.sum(), x)
    with FakeTensorMode():
        graphs.append(decomposition_graph(scratch_op.default, torch.empty(3, 3)))
    for graph in graphs:
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [aten.mm.default]
        assert graph(2 * x).tolist() == (4 * x).tolist()


def test_graphs_take_arguments_by_name():
    y = torch.ones(2, 3).softmax(1)
    args = {"output": y, "dim": 1, "input_dtype": torch.float32}
    graph = decomposition_graph(aten._softmax_backward_data.default, y * 2, **args)
    torch.testing.assert_close(graph(y * 3, y, 1, torch.float32), aten._softmax_backward_data(y * 3, **args))
