"""The decomposition tables: values, every nesting to order 3, batches and graphs."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacfwd, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from perf.operator_calls import Recorder, as_real
from primitives._core.decomposition import (
    decomposition_table,
    get_decomposition,
)
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


INDEX, BAGS = torch.tensor([0, 2, 2, 2, 1]), (torch.tensor([1, 3, 0, 3, 2, 1]), torch.tensor([0, 2, 2, 5]))
LENGTHS = torch.tensor([[2, 0, 3], [1, 4, 0]])
# An operator, and calls of it.
CALLS = {
    "cdist": (
        aten._cdist_forward.default,
        *[lambda f, p=p: f(randn(2, 3, 4), randn(5, 4), p, None) for p in (2, 1, 3.5)],
        lambda f: f(torch.ones(1, 2, **DOUBLE), randn(3, 2), 2.0, None),  # a row twice
    ),
    "pdist": (aten._pdist_forward.default, lambda f: f(randn(4, 3), 2.0), lambda f: f(randn(4, 3), 1.5)),
    "dist": (aten.dist.default, lambda f: f(randn(3, 4), randn(4)), lambda f: f(randn(3), randn(3), 3)),
    "norm": (aten.norm.ScalarOpt_dim, lambda f: f(randn(3, 4), 2, [1]), lambda f: f(cmplx(3, 4), 3, [0], True)),
    "vector_norm": (
        aten.linalg_vector_norm.default,
        *[lambda f, p=p: f(zeros_among(3, 4), p, [1]) for p in (2, 4, float("inf"))],
        lambda f: f(cmplx(4), 2),
    ),
    "renorm": (aten.renorm.default, lambda f: f(randn(3, 4), 2, 0, 1.0), lambda f: f(randn(2, 3, 2), 3, -1, 2.0)),
    "cholesky_inverse": (
        aten.cholesky_inverse.default,
        lambda f: f(factor(2, 3, 3)),
        lambda f: f(factor(3, 3).mT, True),
    ),
    "cholesky_solve": (
        aten.cholesky_solve.default,
        lambda f: f(randn(3, 2), factor(3, 3, 3)),
        lambda f: f(randn(2, 3, 1), factor(3, 3).mT, True),
        # The half that is not read has no derivative.
        lambda f: f(randn(3, 2), factor(3, 3) + randn(3, 3).triu(1)),
    ),
    "triangular_solve": (
        aten.triangular_solve.default,
        lambda f: f(randn(2, 3, 2), factor(3, 3), False),
        lambda f: f(randn(3, 2), factor(3, 3), False, True, True),
    ),
    "solve": (
        aten._linalg_solve_ex.default,
        lambda f: f(definite(3, 3), randn(3, 2)),
        lambda f: f(definite(2, 3, 3), randn(2, 3)),
        lambda f: f(definite(2, 1, 3, 3), randn(4, 3, 3), left=False),
    ),
    "householder_product": (aten.linalg_householder_product.default, lambda f: f(randn(2, 4, 3), randn(2, 2))),
    "ormqr": (
        aten.ormqr.default,
        lambda f: f(randn(4, 3), randn(3), randn(4, 2)),
        lambda f: f(randn(4, 3), randn(3), randn(2, 4), False, True),
        lambda f: f(cmplx(3, 2), cmplx(2), cmplx(3, 2), True, True),
    ),
    "eigh": (aten._linalg_eigh.default, lambda f: f(definite(2, 3, 3)), lambda f: f(definite(3, 3), "U")),
    "cumprod": (
        aten.cumprod.default,
        *[lambda f, x=x: f(x(), 0) for x in (lambda: zeros_among(7, 2), lambda: randn(5), lambda: cmplx(3))],
    ),
    "prod": (aten.prod.default, lambda f: f(zeros_among(2, 3)), lambda f: f(cmplx(5))),
    "prod of an axis": (aten.prod.dim_int, lambda f: f(zeros_among(3, 5), 1), lambda f: f(zeros_among(7), 0, True)),
    "logcumsumexp": (aten.logcumsumexp.default, lambda f: f(randn(2, 5), 1), lambda f: f(cmplx(4), 0)),
    "pow": (aten.pow.Tensor_Tensor, lambda f: f(randn(4).abs(), zeros_among(3, 4))),
    "i1": (aten.special_i1.default, lambda f: f(torch.tensor([0.0, 1e-3, 0.7, -0.99, 1.01, 4.0, -9.0], **DOUBLE))),
    "scatter_reduce": (
        aten.scatter_reduce.two,
        lambda f: f(randn(3), 0, INDEX, zeros_among(5), "prod"),
        lambda f: f(randn(2, 4), 1, INDEX[None], randn(2, 6), "prod", include_self=False),
    ),
    "index_reduce": (
        aten.index_reduce.default,
        *[
            lambda f, r=r: f(randn(2, 3, 2), 1, INDEX, randn(2, 5, 2), r, include_self=r == "mean")
            for r in ("prod", "mean", "amax")
        ],
    ),
    "segment_reduce": (
        aten.segment_reduce.default,
        *[
            lambda f, r=r: f(randn(2, 5, 2), r, lengths=LENGTHS, axis=1, unsafe=False, initial=1.0)
            for r in ("sum", "mean", "prod", "max")
        ],
        lambda f: f(randn(5), "min", offsets=torch.tensor([0, 2, 5])),
    ),
    "embedding_bag": (
        aten._embedding_bag.default,
        *[lambda f, m=m: f(randn(4, 2), *BAGS, False, m, False, None, m == 2, 3) for m in (0, 1, 2)],
        lambda f: f(randn(4, 2), *BAGS, False, 0, False, randn(6)),
    ),
    "grid_sampler_3d": (
        aten.grid_sampler_3d.default,
        *[
            lambda f, o=o: f(randn(2, 2, 2, 3, 2), 1.2 * torch.rand(2, 1, 2, 2, 3, **DOUBLE) - 0.6, *o)
            for o in ((0, 0, False), (0, 1, True), (0, 2, False), (0, 2, True), (1, 0, True))
        ],
    ),
}  # fmt: skip
if hasattr(aten, "cholesky"):  # up to torch 2.14
    CALLS["cholesky"] = aten.cholesky.default, lambda f: f(definite(2, 3, 3)), lambda f: f(definite(3, 3), True)
# Functions whose forward and backward passes call operators of the table, with arguments as ATen makes them.
RECORDED = {
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


def _recorded(make):
    """The calls of operators of the table that a function makes, and a backward pass through what it returns."""
    calls = []

    def see(op, args, kwargs):
        if op in decomposition_table:
            given = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            moves = [i for i, a in enumerate(args) if getattr(a, "requires_grad", False)]
            # Given rstd it takes eps for what is left of it, so moving x alone moves eps: a test of its own stands in.
            is_alone = op is aten.native_layer_norm_backward.default
            calls.append((op, given, kwargs, [] if is_alone else [0, 1] if "backward" in str(op) else moves))

    with Recorder(see):
        y = make()
        y.backward(torch.randn_like(y))
    assert calls
    return calls


def _direct(op, make):
    """A call of an operator that is made by itself."""
    args, kwargs = make(lambda *args, **kwargs: ([*args], kwargs))
    dtypes = torch.float64, torch.complex128
    return [(op, args, kwargs, [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype in dtypes])]


EACH = {
    **{
        f"{name} {n}": lambda op=op, make=make: _direct(op, make)
        for name, (op, *makes) in CALLS.items()
        for n, make in enumerate(makes)
    },
    **{name: lambda make=make: _recorded(make) for name, make in RECORDED.items()},
}
BY_NIGHT = {f"grid_sampler_3d {number}" for number in (1, 2, 3)}
BY_NIGHT |= {name for name in RECORDED if name.endswith(("_functional", "_with_update"))}
# One call of each operator.
FIRST = [f"{name} 0" for name in CALLS]


@pytest.mark.parametrize("name", EACH)
def test_values_are_those_of_torch(name):
    for op, args, kwargs, _ in EACH[name]():
        strided = [x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in args]
        # Backward operators and torch's distances of pairs take no other tensors than contiguous ones.
        for call in (args,) if name in RECORDED or op is aten._pdist_forward.default else (args, strided):
            results = []
            for function in (op, get_decomposition(op)):
                given = [a.clone() if isinstance(a, torch.Tensor) else a for a in call]
                outputs = function(*given, **kwargs)
                # Also what is written in place.
                results.append([*(outputs if isinstance(outputs, (tuple, list)) else [outputs]), *given])
            # ATen may have a cotangent for a parameter that is not there.
            pairs = [pair for pair in zip(*results, strict=True) if isinstance(pair[1], torch.Tensor)]
            torch.testing.assert_close(*zip(*pairs, strict=True), check_stride=False)


def scalars(name):
    """A function of the tensors that move, by their parts where they are complex, and these, for each call."""
    for op, args, kwargs, places in EACH[name]():

        def function(*xs, op=op, args=args, kwargs=kwargs, places=places):
            given = dict(zip(places, xs, strict=True))
            given = {i: torch.view_as_complex(x) if args[i].is_complex() else x for i, x in given.items()}
            outputs = get_decomposition(op)(*[given.get(i, x) for i, x in enumerate(args)], **kwargs)
            outputs = map(as_real, outputs if isinstance(outputs, (tuple, list)) else [outputs])
            moving = [y for y in outputs if y is not None and y.is_floating_point()]
            return sum(
                ((y + y * y / 2) * torch.arange(y.numel(), **DOUBLE).cos().reshape(y.shape)).sum() for y in moving
            )

        if places:
            yield function, [as_real(args[i]) for i in places]


# Seconds each: by night ways to sample between the first and the last, and batch norms of the same formulas.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in BY_NIGHT)) for n in EACH])
def test_every_nesting_to_order_three_is_right(name):
    for function, xs in scalars(name):
        directions = [torch.randn_like(x) for x in xs]
        if name.startswith(("cholesky ", "eigh ")):
            # Of a symmetric matrix a half is read.
            directions = [v + v.mT for v in directions]
        assert len([*right_nestings(function, xs, directions)]) == 14


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", FIRST)
def test_batches_of_derivatives(name):
    for function, xs in scalars(name):
        calls, every = [xs, [x * 1.1 for x in xs]], tuple(range(len(xs)))
        for derivative in (jacrev(function, every), jacfwd(function, every), jacrev(grad(function), every[-1])):
            found = vmap(derivative)(*map(torch.stack, zip(*calls, strict=True)))
            torch.testing.assert_close(tree_map(lambda y: y[1], found), derivative(*calls[1]))


@pytest.mark.parametrize("name", FIRST)
def test_they_are_traced(name):
    for function, xs in scalars(name):
        graph = make_fx(grad(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*xs)
        torch.testing.assert_close(graph(*xs), grad(function)(*xs))


# Dynamo takes half a second each.
@pytest.mark.nightly
@pytest.mark.parametrize("name", FIRST)
def test_they_are_compiled(name):
    for function, xs in scalars(name):
        torch.compiler.reset()
        gradient = torch.compile(grad(function), backend="aot_eager", fullgraph=True)(*xs)
        torch.testing.assert_close(gradient, grad(function)(*xs))
