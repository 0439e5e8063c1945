"""Formulas of operators whose derivatives torch has wrong or lacks: values, every nesting to order 3, errors."""

from pathlib import Path

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from perf.torch_derivatives import counts, page
from primitives._audit.table import read_table
from primitives.decompositions import get_decomposition
from tests.support import DOUBLE, randn, right_nestings

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


def factor(*shape):
    return randn(*shape).tril() + 2 * torch.eye(shape[-1], **DOUBLE)


def definite(*shape):
    return (x := randn(*shape)) @ x.mT + torch.eye(shape[-1], **DOUBLE)


def zeros_among(*shape):
    return randn(*shape).masked_fill(torch.arange(torch.Size(shape).numel()).reshape(shape) % 3 == 0, 0.0)


def cmplx(*shape):
    return torch.complex(randn(*shape), randn(*shape))


INDEX, BAGS = torch.tensor([0, 2, 2, 2, 1]), (torch.tensor([1, 3, 0, 3, 2, 1]), torch.tensor([0, 2, 2, 5]))
LENGTHS = torch.tensor([[2, 0, 3], [1, 4, 0]])
# An operator, and the arguments of each call.
CALLS = {
    "cdist": (aten._cdist_forward.default, *[lambda p=p: (randn(2, 3, 4), randn(5, 4), p, None) for p in (2, 1, 3.5)]),
    "cdist, a row twice": (aten._cdist_forward.default, lambda: (torch.ones(1, 2, **DOUBLE), randn(3, 2), 2.0, None)),
    "pdist": (aten._pdist_forward.default, lambda: (randn(4, 3), 2.0), lambda: (randn(4, 3), 1.5)),
    "dist": (aten.dist.default, lambda: (randn(3, 4), randn(4)), lambda: (randn(3), randn(3), 3)),
    "norm": (aten.norm.ScalarOpt_dim, lambda: (randn(3, 4), 2, [1]), lambda: (cmplx(3, 4), 3, [0], True)),
    "vector_norm": (
        aten.linalg_vector_norm.default,
        *[lambda p=p: (zeros_among(3, 4), p, [1]) for p in (2, 4, float("inf"))],
        lambda: (cmplx(4), 2),
    ),
    "renorm": (aten.renorm.default, lambda: (randn(3, 4), 2, 0, 1.0), lambda: (randn(2, 3, 2), 3, -1, 2.0)),
    "cholesky_inverse": (aten.cholesky_inverse.default, lambda: (factor(2, 3, 3),), lambda: (factor(3, 3).mT, True)),
    "cholesky_solve": (
        aten.cholesky_solve.default,
        lambda: (randn(3, 2), factor(3, 3, 3)),
        lambda: (randn(2, 3, 1), factor(3, 3).mT, True),
        # The half that is not read has no derivative.
        lambda: (randn(3, 2), factor(3, 3) + randn(3, 3).triu(1)),
    ),
    "triangular_solve": (
        aten.triangular_solve.default,
        lambda: (randn(2, 3, 2), factor(3, 3), False),
        lambda: (randn(3, 2), factor(3, 3), False, True, True),
    ),
    "solve": (
        aten._linalg_solve_ex.default,
        lambda: (definite(3, 3), randn(3, 2)),
        lambda: (definite(2, 3, 3), randn(2, 3)),
        lambda: (definite(2, 1, 3, 3), randn(4, 3, 3), False),
    ),
    "householder_product": (aten.linalg_householder_product.default, lambda: (randn(2, 4, 3), randn(2, 2))),
    "ormqr": (
        aten.ormqr.default,
        lambda: (randn(4, 3), randn(3), randn(4, 2)),
        lambda: (randn(4, 3), randn(3), randn(2, 4), False, True),
        lambda: (cmplx(3, 2), cmplx(2), cmplx(3, 2), True, True),
    ),
    "eigh": (aten._linalg_eigh.default, lambda: (definite(2, 3, 3),), lambda: (definite(3, 3), "U")),
    "cumprod": (aten.cumprod.default, lambda: (zeros_among(2, 7), 1), lambda: (randn(5), 0), lambda: (cmplx(3), 0)),
    "prod": (aten.prod.default, lambda: (zeros_among(2, 3),), lambda: (cmplx(5),)),
    "prod of an axis": (aten.prod.dim_int, lambda: (zeros_among(3, 5), 1), lambda: (zeros_among(7), 0, True)),
    "logcumsumexp": (aten.logcumsumexp.default, lambda: (randn(2, 5), 1), lambda: (cmplx(4), 0)),
    "pow": (aten.pow.Tensor_Tensor, lambda: (randn(4).abs(), zeros_among(3, 4))),
    "i1": (aten.special_i1.default, lambda: (torch.tensor([0.0, 1e-3, 0.7, -0.99, 1.01, 4.0, -9.0], **DOUBLE),)),
    "scatter_reduce": (
        aten.scatter_reduce.two,
        lambda: (randn(3), 0, INDEX, zeros_among(5), "prod"),
        lambda: (randn(2, 4), 1, INDEX[None], randn(2, 6), "prod", False),
    ),
    "index_reduce": (
        aten.index_reduce.default,
        *[lambda r=r: (randn(2, 3, 2), 1, INDEX, randn(2, 5, 2), r, r == "mean") for r in ("prod", "mean", "amax")],
    ),
    "segment_reduce": (
        aten.segment_reduce.default,
        *[lambda r=r: (randn(2, 5, 2), r, LENGTHS, None, None, 1, False, 1.0) for r in ("sum", "mean", "prod", "max")],
        lambda: (randn(5), "min", None, None, torch.tensor([0, 2, 5])),
    ),
    "embedding_bag": (
        aten._embedding_bag.default,
        *[lambda m=m: (randn(4, 2), *BAGS, False, m, False, None, m == 2, 3) for m in (0, 1, 2)],
        lambda: (randn(4, 2), *BAGS, False, 0, False, randn(6)),
    ),
    "grid_sampler_3d": (
        aten.grid_sampler_3d.default,
        *[
            lambda o=o: (randn(2, 2, 2, 3, 2), 1.2 * torch.rand(2, 1, 2, 2, 3, **DOUBLE) - 0.6, *o)
            for o in ((0, 0, False), (0, 1, True), (0, 2, False), (0, 2, True), (1, 0, True))
        ],
    ),
}  # fmt: skip
if hasattr(aten, "cholesky"):  # up to torch 2.14
    CALLS["cholesky"] = aten.cholesky.default, lambda: (definite(2, 3, 3),), lambda: (definite(3, 3), True)
BY_NIGHT = {f"grid_sampler_3d {number}" for number in (1, 2, 3)}
EACH = [
    pytest.param(op, make, id=f"{name} {n}") for name, (op, *makes) in CALLS.items() for n, make in enumerate(makes)
]


def by_keyword(op, args):
    """A call's arguments, those by name apart that the schema wants by name."""
    names = [a.name for a in op._schema.arguments]
    kwargs = {n: v for n, v, a in zip(names, args, op._schema.arguments, strict=False) if a.kwarg_only}
    return args[: len(args) - len(kwargs)], kwargs


def listed(outputs):
    return [*outputs] if isinstance(outputs, (tuple, list)) else [outputs]


@pytest.mark.parametrize("op, make", EACH)
def test_values_dtypes_and_shapes_are_those_of_torch(op, make):
    args, kwargs = by_keyword(op, make())
    strided = [x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in args]
    # Torch's distances of pairs take no other matrix than a contiguous one.
    for given in (args,) if op is aten._pdist_forward.default else (args, strided):
        torch.testing.assert_close(get_decomposition(op)(*given, **kwargs), op(*given, **kwargs))


def scalar(op, args, kwargs):
    """A function of the tensors, by their parts where they are complex, and these."""
    places = [
        i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and (x.is_complex() or x.dtype == torch.float64)
    ]

    def function(*xs):
        given = dict(zip(places, xs, strict=True))
        given = {i: torch.view_as_complex(x) if args[i].is_complex() else x for i, x in given.items()}
        outputs = listed(get_decomposition(op)(*[given.get(i, x) for i, x in enumerate(args)], **kwargs))
        moving = [
            torch.view_as_real(y) if y.is_complex() else y
            for y in outputs
            if y.dtype.is_floating_point or y.is_complex()
        ]
        return sum(((y + y * y / 2) * torch.arange(y.numel(), **DOUBLE).cos().reshape(y.shape)).sum() for y in moving)

    return function, [torch.view_as_real(args[i]) if args[i].is_complex() else args[i] for i in places]


# Two seconds for each way to sample: by night those between the first and the last.
@pytest.mark.parametrize(
    "op, make",
    [pytest.param(*each.values, id=each.id, marks=[pytest.mark.nightly] * (each.id in BY_NIGHT)) for each in EACH],
)
def test_every_nesting_to_order_three_is_right(op, make):
    args, kwargs = by_keyword(op, make())
    function, xs = scalar(op, args, kwargs)
    directions = [torch.randn_like(x) for x in xs]
    if op.name() in ("aten::cholesky", "aten::_linalg_eigh"):
        # Of a symmetric matrix a half is read.
        directions = [v + v.mT for v in directions]
    assert len([*right_nestings(function, xs, directions)]) == 14


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_batches_of_derivatives(name):
    op, make, *_ = CALLS[name]
    args, kwargs = by_keyword(op, make())
    function, xs = scalar(op, args, kwargs)
    calls, every = [xs, [x * 1.1 for x in xs]], tuple(range(len(xs)))
    for derivative in (jacrev(function, every), jacfwd(function, every), jacrev(grad(function), every[-1])):
        found = vmap(derivative)(*map(torch.stack, zip(*calls, strict=True)))
        torch.testing.assert_close(tree_map(lambda y: y[1], found), derivative(*calls[1]))


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
    ],
)  # fmt: skip
def test_edges_are_those_of_torch(op, args):
    torch.testing.assert_close(get_decomposition(op)(*args), op(*args), equal_nan=True)


REFUSED = {
    "rows of two lengths": (aten._cdist_forward.default, lambda: (randn(2, 3), randn(2, 1), 2.0, None)),
    "negative p": (aten._cdist_forward.default, lambda: (randn(2, 3), randn(2, 3), -1.0, None)),
    "pdist of vectors": (aten._pdist_forward.default, lambda: (randn(3),)),
    "renorm of a vector": (aten.renorm.default, lambda: (randn(3), 2, 0, 1.0)),
    "norm of integers": (aten.linalg_vector_norm.default, lambda: (torch.arange(3),)),
    "not square": (aten.cholesky_inverse.default, lambda: (randn(2, 3),)),
    "systems of two sizes": (aten.cholesky_solve.default, lambda: (randn(2, 1), factor(3, 3))),
    "too many reflections": (aten.linalg_householder_product.default, lambda: (randn(3, 2), randn(3))),
    "wide reflections": (aten.linalg_householder_product.default, lambda: (randn(2, 3), randn(2))),
    "ormqr of two sizes": (aten.ormqr.default, lambda: (randn(3, 2), randn(2), randn(2, 2))),
    "a rectangle": (aten._linalg_eigh.default, lambda: (randn(2, 3),)),
    "no axis": (aten.cumprod.default, lambda: (randn(2), 1)),
    "no axis to reduce": (aten.prod.dim_int, lambda: (randn(2), 2)),
    "no such place": (aten.scatter_reduce.two, lambda: (randn(2), 0, torch.tensor([2]), randn(1), "prod")),
    "no such reduction": (aten.index_reduce.default, lambda: (randn(3), 0, INDEX, randn(5), "sum")),
    "too few places": (aten.index_reduce.default, lambda: (randn(3), 0, INDEX, randn(4), "prod")),
    "lengths that do not add up": (aten.segment_reduce.default, lambda: (randn(5), "sum", torch.tensor([2, 2]))),
    "no segments": (aten.segment_reduce.default, lambda: (randn(5), "sum")),
    "no such row": (aten._embedding_bag.default, lambda: (randn(4, 2), torch.tensor([4]), torch.tensor([0]))),
    "a grid of another batch": (
        aten.grid_sampler_3d.default,
        lambda: (randn(2, 1, 2, 2, 2), randn(1, 1, 1, 1, 3), 0, 0, True),
    ),
}  # fmt: skip
if hasattr(aten, "cholesky"):
    REFUSED["not definite"] = aten.cholesky.default, lambda: (-torch.eye(2, **DOUBLE),)


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_torch_refuses_are_refused_by_the_same_type_of_error(name):
    op, make = REFUSED[name]
    args, kwargs = by_keyword(op, make())
    errors = []
    for function in (op, get_decomposition(op)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - torch's own type is what the other must be
            function(*args, **kwargs)
        errors.append(caught.type)
    assert issubclass(errors[1], errors[0])


@pytest.mark.parametrize("name", CALLS)
def test_formulas_are_traced(name):
    op, make, *_ = CALLS[name]
    function, xs = scalar(op, *by_keyword(op, make()))
    graph = make_fx(grad(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*xs)
    torch.testing.assert_close(graph(*xs), grad(function)(*xs))


# Dynamo takes half a second each.
@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLS)
def test_formulas_are_compiled(name):
    op, make, *_ = CALLS[name]
    function, xs = scalar(op, *by_keyword(op, make()))
    torch.compiler.reset()
    gradient = torch.compile(grad(function), backend="aot_eager", fullgraph=True)(*xs)
    torch.testing.assert_close(gradient, grad(function)(*xs))


def test_the_page_of_the_table_is_written_from_it_and_repaired_torch_is_nowhere_wrong():
    path = Path(__file__).parents[1] / "docs" / "reference" / "torch_derivatives.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m perf.torch_derivatives --page"
    (_, total, *_), (_, _, wrong, early, _) = counts(read_table())
    assert total > 300
    # The one stands for literals, which have no tangent; the page has its reason.
    assert (wrong, early) == (0, 1)
