"""The table of decompositions: edges, refusals, entries of your own, and graphs."""

import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from perf.torch_derivatives import counts, page
from primitives._audit.table import read_table
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
from tests.test_decompositions import INDEX, factor, running

aten = torch.ops.aten
ONES, HALVES = torch.ones(3), torch.tensor([1.0, -1.0, -1.0, 1.0]).half().outer(torch.ones(3).half())
LABELS, LOGS = torch.tensor([1, 156, 199], dtype=torch.uint8), torch.zeros(3, 200, **DOUBLE)


@pytest.mark.parametrize(
    "op, args",
    [
        (aten._cdist_forward.default, (torch.zeros(0, 3), torch.zeros(2, 3), 2.0, None)),
        (aten._cdist_forward.default, (torch.zeros(1, 0), torch.zeros(2, 0), float("inf"), None)),
        (aten._pdist_forward.default, (torch.zeros(1, 3), 2.0)),
        (aten.cumprod.default, (torch.zeros(2, 0), 1)),
        (aten.cumprod.default, (torch.tensor(True), 0)),
        (aten.prod.dim_int, (torch.zeros(2, 0), 1)),
        (aten.prod.default, (torch.tensor([2, 3], dtype=torch.int32),)),
        (aten.logcumsumexp.default, (torch.full((3,), -torch.inf), 0)),
        (aten.logcumsumexp.default, (torch.randn(3).half(), 0)),
        (aten.linalg_householder_product.default, (torch.zeros(2, 3, 0), torch.zeros(2, 0))),
        (aten._linalg_eigh.default, (torch.zeros(0, 3, 3), "L", False)),
        (aten.scatter_reduce.two, (torch.ones(3), 0, torch.zeros(0, dtype=torch.int64), torch.ones(2), "prod")),
        (aten.linalg_vector_norm.default, (torch.randn(3).half(), 3)),
        (aten.pow.Tensor_Tensor, (torch.tensor([-2.0, 0.0, 3.0]), torch.tensor([3.0, 0.0, 0.0]))),
        (aten.special_i1.default, (torch.tensor([700.0, -800.0, 0.5], **DOUBLE),)),
        # Rows without elements.
        (aten.native_layer_norm.default, (torch.zeros(4, 0), [0], None, None, 1e-5)),
        # Statistics have a dtype of their own.
        *[
            (aten.native_layer_norm.default, (HALVES, [3], weight, None, 1e-5))
            for weight in (None, ONES.half(), ONES)
        ],
        *[
            (aten.native_batch_norm.default, (HALVES, *given, True, 0.1, 1e-5))
            for x in (ONES.half(), ONES)
            for given in ((x, None, x + 1, x * 2), (x, None, None, None))
        ],
        # -100, the label to ignore, is 156 as a byte, which is a label like any other.
        (aten.nll_loss_backward.default, (ONES.double(), LOGS, LABELS, None, 0, -100, torch.tensor(3.0, **DOUBLE))),
    ],
)  # fmt: skip
def test_edges_are_those_of_torch(op, args):
    torch.testing.assert_close(get_decomposition(op)(*args), op(*args), equal_nan=True)


def test_there_are_no_rows():
    """Which ends the process in ATen."""
    x, empty, weight, mask = torch.zeros(0, 3), torch.zeros(0, 1), torch.ones(3), (True, True, True)
    for op, args in (
        (aten.native_layer_norm_backward.default, (x, x, [3], empty, empty, weight, weight, mask)),
        (aten.native_batch_norm_backward.default, (x, x, *[weight] * 5, True, 1e-5, mask)),
    ):
        torch.testing.assert_close(get_decomposition(op)(*args), (x, *[torch.zeros_like(weight)] * 2))


REFUSED = {
    "rows of two lengths": (aten._cdist_forward.default, lambda f: f(randn(2, 3), randn(2, 1), 2.0, None)),
    "negative p": (aten._cdist_forward.default, lambda f: f(randn(2, 3), randn(2, 3), -1.0, None)),
    "pdist of vectors": (aten._pdist_forward.default, lambda f: f(randn(3))),
    "renorm of a vector": (aten.renorm.default, lambda f: f(randn(3), 2, 0, 1.0)),
    "norm of integers": (aten.linalg_vector_norm.default, lambda f: f(torch.arange(3))),
    "not square": (aten.cholesky_inverse.default, lambda f: f(randn(2, 3))),
    "systems of two sizes": (aten.cholesky_solve.default, lambda f: f(randn(2, 1), factor(3, 3))),
    "too many reflections": (aten.linalg_householder_product.default, lambda f: f(randn(3, 2), randn(3))),
    "wide reflections": (aten.linalg_householder_product.default, lambda f: f(randn(2, 3), randn(2))),
    "ormqr of two sizes": (aten.ormqr.default, lambda f: f(randn(3, 2), randn(2), randn(2, 2))),
    "a rectangle": (aten._linalg_eigh.default, lambda f: f(randn(2, 3))),
    "no axis": (aten.cumprod.default, lambda f: f(randn(2), 1)),
    "no axis to reduce": (aten.prod.dim_int, lambda f: f(randn(2), 2)),
    "no such place": (aten.scatter_reduce.two, lambda f: f(randn(2), 0, torch.tensor([2]), randn(1), "prod")),
    "no such reduction": (aten.index_reduce.default, lambda f: f(randn(3), 0, INDEX, randn(5), "sum")),
    "too few places": (aten.index_reduce.default, lambda f: f(randn(3), 0, INDEX, randn(4), "prod")),
    "lengths that do not add up": (aten.segment_reduce.default, lambda f: f(randn(5), "sum", lengths=INDEX[:2])),
    "no segments": (aten.segment_reduce.default, lambda f: f(randn(5), "sum")),
    "no such row": (aten._embedding_bag.default, lambda f: f(randn(4, 2), torch.tensor([4]), torch.tensor([0]))),
    "a grid of another batch": (
        aten.grid_sampler_3d.default,
        lambda f: f(randn(2, 1, 2, 2, 2), randn(1, 1, 1, 1, 3), 0, 0, True),
    ),
}  # fmt: skip
if hasattr(aten, "cholesky"):
    REFUSED["not definite"] = aten.cholesky.default, lambda f: f(-torch.eye(2, **DOUBLE))


@pytest.mark.parametrize("op, call", REFUSED.values(), ids=REFUSED)
def test_arguments_that_torch_refuses_are_refused_by_the_same_type_of_error(op, call):
    errors = []
    for function in (op, get_decomposition(op)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own type is what the other must be
            call(function)
        errors.append(caught.type)
    assert issubclass(errors[1], errors[0])


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


def test_the_page_of_the_table_is_written_from_it_and_repaired_torch_is_nowhere_wrong():
    path = Path(__file__).parents[1] / "docs" / "reference" / "torch_derivatives.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m perf.torch_derivatives --page"
    (_, total, *_), (_, _, wrong, early, _) = counts(read_table())
    assert total > 300
    # The one stands for literals, which have no tangent; the page has its reason.
    assert (wrong, early) == (0, 1)
