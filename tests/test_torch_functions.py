"""Functions of torch whose nested derivatives are wrong or raise, right inside `repair_torch`."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import primitives as pr
from perf.ops.samples import normal
from primitives._audit.nestings import nested, nested_by_autograd, perturbed_sum
from tests.support import randn, right_nestings

pytestmark = pytest.mark.usefixtures("seeded")

MATRIX, COLUMNS, VECTOR, ROWS = (3, 3), (3, 2), (3,), (4, 3)
GRID = (1, 2, 2, 2)

PAIR = torch.tensor([0, 0])
ZEROS = torch.tensor([2.0, 0.0, 3.0, 0.0], dtype=torch.float64)
CLASSES, CHUNKED = torch.tensor([0, 4, 2, 4]), getattr(torch.nn, "LinearCrossEntropyOptions", None)
HIDDEN = torch.tensor([[True, False, True], [False, False, False]])
MASKED = torch.tensor([-torch.inf, 0.3, -torch.inf, -1.0], dtype=torch.float64)


def _of_eigenvectors(x):
    """What no phase of them changes."""
    values, vectors = torch.linalg.eig(x)
    results = torch.linalg.eigvals(x), vectors @ (values.exp().unsqueeze(-1) * vectors.inverse())
    return torch.cat([*(torch.view_as_real(y).flatten() for y in results), vectors.abs().flatten()])


# A function, and its arguments or their shapes.
CASES = {
    "det": (lambda a: a.det(), [(2, *MATRIX)]),
    "slogdet": (lambda a: torch.slogdet(a)[1], [MATRIX]),
    "logdet": (lambda a: torch.logdet(a @ a.mT), [MATRIX]),
    "solve": (torch.linalg.solve, [MATRIX, COLUMNS]),
    "solve, vector": (torch.linalg.solve, [MATRIX, VECTOR]),
    "solve, vectors": (torch.linalg.solve, [(2, *MATRIX), (2, *VECTOR)]),
    "solve, from the right": (lambda a, b: torch.linalg.solve_ex(a, b, left=False)[0], [MATRIX, (2, 3)]),
    "normalize": (F.normalize, [MATRIX]),
    "norm": (torch.norm, [MATRIX]),
    "std": (torch.std, [MATRIX]),
    "std_mean": (lambda x: sum(torch.std_mean(x, 1, keepdim=True)), [MATRIX]),
    "glu": (lambda x: F.glu(x, 0), [(4, 3)]),
    "hardsigmoid": (F.hardsigmoid, [MATRIX]),
    "huber loss": (lambda x, y: F.huber_loss(x, y, delta=0.7), [MATRIX, MATRIX]),
    "huber loss, of equals": (lambda x: F.huber_loss(x - x.mT, 0 * x, reduction="sum"), [MATRIX]),
    "soft margin loss": (lambda x: F.soft_margin_loss(x, x.detach().sign()), [MATRIX]),
    "group norm, channels_last": (
        lambda x, w: F.group_norm(x.contiguous(memory_format=torch.channels_last), 2, w),
        [(2, 4, 2, 2), (4,)],
    ),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), [(3, 4), (3, 1)]),
    "cumprod, zeros": (lambda x: x.cumprod(0), [ZEROS]),
    "cumprod, matrix": (lambda x: torch.cumprod(x, dim=-1), [MATRIX]),
    "pow, of zero and less": (lambda x: (x - 2.0).unsqueeze(1) ** torch.arange(5), [ZEROS]),
    "sinc, zeros": (torch.sinc, [ZEROS]),
    "logaddexp, masked": (lambda x: torch.logaddexp(x + MASKED, x.sin()), [ZEROS]),
    **{
        f"linear cross entropy, {reduction}": (
            lambda x, w, r=reduction, o=options: F.linear_cross_entropy(
                x, w, CLASSES, reduction=r, options=CHUNKED(**o)
            ),
            [(4, 3), (5, 3)],
        )
        # Its backward pass is Python, which frees what it has saved unless it is told to keep it.
        for reduction, options in (
            ("mean", {"chunking_method": "aspect_ratio:1", "allow_retain_graph": True}),
            ("none", {}),
        )
        if CHUNKED is not None
    },
    "layer norm": (lambda x: F.layer_norm(x, (3,), x[0] + 2, x[1], 0.3), [ROWS]),
    "batch norm": (lambda x: F.batch_norm(x, None, None, x[0] + 2, x[1], True, eps=0.3), [ROWS]),
    "instance norm": (lambda x: F.instance_norm(x.reshape(1, 3, 4), eps=0.3), [ROWS]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q.sin(), q, is_causal=True), [(1, 2, 3, 2)]),
    "softmax": (lambda x: x.softmax(-1), [ROWS]),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(4) % 3), [ROWS]),
    "logsumexp": (lambda x: x.logsumexp((0, 1)), [ROWS]),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), [ROWS]),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), [ROWS]),
    **{
        f"cosine embedding loss, {options}": (
            lambda x, y, o=options: F.cosine_embedding_loss(x, y, torch.tensor([1, -1, 1, -1]), **o),
            [ROWS, ROWS],
        )
        for options in ({"reduction": "none"}, {"margin": 0.2}, {"reduction": "sum"})
    },
    **{f"det of rank {rank}": (torch.linalg.det, [normal((3, rank), 1) @ normal((rank, 3), 2)]) for rank in range(3)},
    "safe softmax, a row without a key": (
        lambda x: torch.ops.aten._safe_softmax(torch.where(HIDDEN, x, -torch.inf), -1),
        [(2, 3)],
    ),
    **{
        f"attention, mask of {mask.dtype}": (
            lambda x, m=mask: F.scaled_dot_product_attention(x, x, x, m),
            [(1, 2, 3, 4)],
        )
        for mask in (normal((3, 3), 3), torch.ones(3, 3).tril().bool())
    },
    "sinc_": (lambda x: (x * 1).sinc_(), [ZEROS]),
    "pow_": (lambda x: (x * 1).pow_(torch.arange(4)), [ZEROS]),
    "sgn_": (lambda x: torch.view_as_complex(x * 1).sgn_().angle(), [(3, 2)]),
    "powers of zero": (lambda x: 0.0 ** x.exp() + x, [ROWS]),
    **{
        f"{reduce}, two zeros at one place": (
            lambda x, r=reduce: getattr(x.new_ones(2), r)(0, torch.tensor([1, 0, 1, 0]), x, "prod"),
            [ZEROS],
        )
        for reduce in ("scatter_reduce", "index_reduce")
    },
    "eig": (_of_eigenvectors, [(2, 3, 3)]),
    "eig, complex": (lambda x: _of_eigenvectors(torch.view_as_complex(x)), [(2, 3, 3, 2)]),
    "embedding bag of frozen rows": (
        lambda factors: F.embedding_bag(PAIR, normal((4, 3), 0), PAIR[:1], mode="sum", per_sample_weights=factors),
        [(2,)],
    ),
    "grid sample": (lambda x, at: F.grid_sample(x, at.tanh(), align_corners=False), [(1, 1, 4, 4), GRID]),
}
if torch.__version__ >= (2, 13):  # the first with its forward mode
    CASES["aminmax"] = lambda x: torch.stack(torch.aminmax(x, dim=0)), [ROWS]
# Forward mode of `torch.autograd` has one level.
BY_AUTOGRAD = ("rr", "rf", "fr", "rrr", "rrf", "rfr", "frr")


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_nesting_to_order_3_is_right(name):
    function, shapes = CASES[name]
    xs = [shape if isinstance(shape, torch.Tensor) else randn(*shape) for shape in shapes]
    directions = [randn(*x.shape) for x in xs]

    def f(*xs):
        return perturbed_sum([function(*xs)])

    plain = f(*xs)
    with pr.repair_torch():
        torch.testing.assert_close([f(*xs), torch.func.vjp(f, *xs)[0]], [plain, plain])
        found = dict(right_nestings(f, xs, directions))
        assert len(found) == 14
        for nesting in BY_AUTOGRAD:
            by_autograd = nested_by_autograd(f, directions, nesting)(*xs).item()
            assert by_autograd == pytest.approx(found[nesting], rel=1e-9, abs=1e-9), nesting
        if "channels_last" not in name:  # which `vmap` does not make
            assert nested(f, directions, "FR")(*xs).item() == pytest.approx(found["fr"], rel=1e-9, abs=1e-9)


# Rows of each group, the columns of one operand for each, and columns: a mixture's forward and its derivatives.
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
GROUPED = {"rows": [(8, 4), (3, 4, 4)], "sums": [(4, 8), (8, 4)], "columns": [(3, 4, 4), (4, 8)]}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_are_those_of_torch_in_every_nesting(name):
    xs = [randn(*shape) for shape in GROUPED[name]]
    directions = [randn(*x.shape) for x in xs]

    def product(*xs, offs=ENDS):
        with pr.repair_torch():
            return F.grouped_mm(*xs, offs=offs)

    # Torch takes no float64 in plain code, and writes nothing to the row of no group.
    halves, ends = [x.float() for x in xs], ENDS + (ENDS == 7)
    torch.testing.assert_close(product(*halves, offs=ends), torch._grouped_mm(*halves, ends))
    formula = functools.partial(pr.decompositions.get_decomposition(torch.ops.aten._grouped_mm.default), offs=ENDS)
    of_formula, of_torch = (lambda *xs, f=f: perturbed_sum([f(*xs)]) for f in (formula, product))
    for nesting, _ in right_nestings(of_formula, xs, directions):
        if len(nesting) < 3:
            found, truth = (nested(f, directions, nesting)(*xs) for f in (of_torch, of_formula))
            torch.testing.assert_close(found, truth)


# Where torch's first derivatives are right: complex numbers, infinite ones, kinks and zeros.
INF = torch.inf
AS_IN_TORCH = {
    "logsumexp": (lambda z: z.logsumexp(0), [1 + 2j, 0.5 + 1j]),
    "masked logsumexp": (lambda z: torch.masked.logsumexp(z, 0), [1 + 2j, 0.5 + 1j]),
    "logsumexp, complex64": (lambda z: z.to(torch.complex64).logsumexp(0), [1 + 2j, 0.5 + 1j]),
    "logcumsumexp": (lambda z: z.logcumsumexp(0), [4j, 4j, 1 - 9j]),
    "ormqr": (lambda z: torch.view_as_real(torch.ormqr(z, z[0], z, left=False)), [[1 + 2j, 1j], [0.5, 2 - 1j]]),
    "softmax, inf": (lambda x: x.softmax(0), [INF, 1.0]),
    "logaddexp, inf": (lambda x: torch.logaddexp(x, x.new_tensor([1, INF, INF, -INF])), [INF, 1.0, INF, INF]),
    "huber loss, inf": (lambda x: F.huber_loss(x, 0 * x.sign(), reduction="none"), [INF, -INF, 1.0, 0.3]),
    # Beside a row that is not: padding, and channels that are constant.
    **{
        f"{name}, zero row": (function, [[0.0, 0.0, 0.0], [0.3, -1.0, 0.7]])
        for name, function in {
            "normalize": F.normalize,
            "norm": lambda x: torch.linalg.vector_norm(x, dim=1, keepdim=True),
            "norm of order 3": lambda x: torch.norm(x, 3, 1),
            "norm of all": lambda x: torch.norm(x[0]),
            "std": lambda x: torch.std(x, 1),
            "std_mean": lambda x: torch.std_mean(x, 1)[0],
        }.items()
    },
    "multi margin loss, tie": (lambda x: F.multi_margin_loss(x, PAIR[:1]), [[1.0, 0.0, 2.0]]),
    "multi margin loss, row": (lambda x: F.multi_margin_loss(x, PAIR[0], p=2, reduction="none"), [1.0, 0.5, 2.0]),
    **{
        f"multilabel margin loss, {reduction}": (
            lambda x, r=reduction: F.multilabel_margin_loss(
                x, torch.tensor([[2, 0, -1, 3], [-1, 1, 1, 1]]), reduction=r
            ),
            [[0.1, -1.0, 2.0, 0.7], [1.0, 0.5, -0.3, 0.2]],
        )
        for reduction in ("mean", "sum", "none")
    },
    "multilabel margin loss, tie": (lambda x: F.multilabel_margin_loss(x, PAIR - PAIR.new_tensor([0, 1])), [1.0, 0.0]),
    **{
        f"norm of order {order}": (lambda x, p=order: torch.linalg.vector_norm(x, p, -1), [[0.0, 1, -2], [1, 2, 3]])
        for order in (-0.5, -1, -2)
    },
}


def _value_and_derivatives(function, x, mode):
    def numbers(x):
        y = function(x)
        return torch.view_as_real(y) if y.is_complex() else y

    if mode == "jvp":
        return torch.func.jvp(numbers, (x,), (torch.ones_like(x),))
    if mode == "jvp of grad":
        gradient = torch.func.grad(lambda x: perturbed_sum([numbers(x)]))
        return numbers(x), torch.func.jvp(gradient, (x,), (torch.arange(1.0, 7).to(x).reshape(x.shape),))[1]
    if mode == "grad":
        return numbers(x), torch.func.grad(lambda x: numbers(x).sum())(x)
    if mode == "forward_ad":
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(numbers(forward_ad.make_dual(x, torch.ones_like(x)))))
    y = numbers(x.requires_grad_())
    return y.detach(), torch.autograd.grad(y.sum(), x, create_graph=True)[0].detach()


@pytest.mark.parametrize("name", AS_IN_TORCH)
def test_values_and_first_derivatives_that_torch_has_right_stay(name):
    function, x = AS_IN_TORCH[name]
    dtype = torch.complex128 if "j" in str(x) else torch.float64
    # Torch's curvature there is right too.
    for mode in ("jvp", "forward_ad", "grad", "create_graph", *["jvp of grad"] * name.endswith("zero row")):
        with pr.repair_torch():
            found = _value_and_derivatives(function, torch.tensor(x, dtype=dtype), mode)
        try:
            expected = _value_and_derivatives(function, torch.tensor(x, dtype=dtype), mode)
        except NotImplementedError:  # torch has no jvp of some
            expected = _value_and_derivatives(function, torch.tensor(x, dtype=dtype), "grad")[:1]
        torch.testing.assert_close(found[: len(expected)], expected, equal_nan=True, msg=lambda m, k=mode: f"{k}: {m}")


INTEGERS = torch.tensor([1, 2])
REFUSED = {
    "glu, odd": F.glu,
    "glu, integers": lambda x: F.glu(INTEGERS) * x[:1],
    "hardsigmoid": lambda x: F.hardsigmoid(INTEGERS) * x[:2],
    "huber loss, delta": lambda x: F.huber_loss(x, 2 * x, delta=0.0),
    "huber loss, integers": lambda x: F.huber_loss(INTEGERS, INTEGERS) * x,
    "cdist": lambda x: torch.cdist(x.unsqueeze(0), x.unsqueeze(0).float()),
    "softmax, complex": lambda x: (x + 0j).softmax(0),
    "log_softmax, complex": lambda x: (x + 0j).log_softmax(0),
}


@pytest.mark.parametrize("mode", ["jvp", "forward_ad", "grad"])
@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses_is_refused(function, mode):
    x = randn(3)
    with pytest.raises(RuntimeError) as plain:
        function(x)
    with pr.repair_torch(), pytest.raises(type(plain.value)):
        _value_and_derivatives(function, x, mode)


def test_a_singular_system_is_refused_as_in_torch():
    with pr.repair_torch(), pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.solve(torch.zeros(2, 2), torch.ones(2))
