"""Single operators of torch under `repair_torch`, each with a fault that it had."""

import contextlib
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F

import primitives as pr
from primitives._audit.nestings import nested, nestings
from primitives._repair.fused import FUSED
from primitives._repair.nodes import IN_PLACE
from tests.support import randn

pytestmark = pytest.mark.usefixtures("seeded")


PAIRS = {
    "logaddexp": (torch.logaddexp, (3,), (3,)),
    "pow": (lambda x, y: x.exp() ** y, (3,), (3,)),
    "cdist": (torch.cdist, (3, 2), (4, 2)),
    "weight norm": (lambda x, y: torch._weight_norm(x, y, 0), (3, 2), (3, 1)),
    "cholesky_solve": (
        lambda x, y: torch.cholesky_solve(x, y.tril() + 3 * torch.eye(3, dtype=y.dtype)),
        (3, 2),
        (3, 3),
    ),
}


@pytest.mark.parametrize("function, shapes", [(f, shapes) for f, *shapes in PAIRS.values()], ids=PAIRS)
def test_one_argument_is_differentiated_alone_where_others_might_be(function, shapes):
    """As a network by its input, whose parameters want gradients too."""
    leaves = [randn(*shape).requires_grad_() for shape in shapes]
    with pr.repair_torch():
        # Arguments that are computed, and that are leaves.
        for make in (lambda: [x * 1 for x in leaves], lambda: leaves):
            xs = make()
            loss = function(*xs).sin().sum()
            both = torch.autograd.grad(loss, xs, create_graph=True)
            for i, x in enumerate(xs):
                (alone,) = torch.autograd.grad(loss, x, create_graph=True)
                second = [torch.autograd.grad(g.square().sum(), x, retain_graph=True) for g in (alone, both[i])]
                torch.testing.assert_close(alone, both[i])
                torch.testing.assert_close(*second)


def test_norms_of_half_precision_have_second_derivatives():
    x = torch.randn(3, 4, requires_grad=True)
    with pr.repair_torch(), torch.autocast("cpu", torch.bfloat16):
        loss = F.layer_norm(x.bfloat16(), (4,)).float().square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()


def test_first_gradients_of_factors_are_right_under_modes_too():
    b, a = randn(3, 2), (randn(3, 3) + 4 * torch.eye(3)).requires_grad_()
    with pr.repair_torch():
        (expected,) = torch.autograd.grad(torch.cholesky_solve(b, a).sin().sum(), a)
        compiled = torch.compile(lambda a: torch.cholesky_solve(b, a).sin().sum(), backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(a), a)[0], expected)
    assert expected.triu(1).abs().max() == 0


def test_directions_of_complex_numbers_do_not_move_at_zero():
    zero, v = torch.zeros(3, 2, dtype=torch.float64), randn(3, 2)
    with pr.repair_torch():
        found = [nested(lambda x: torch.view_as_complex(x).sgn().abs().sum(), [v], n)(zero) for n in nestings(3)]
    assert not any(found)


class _Kept:
    def __init__(self, x):
        self.x = x


def _bag_changed_later(change, mode="sum", **options):
    leaf = (torch.arange(8.0, dtype=torch.float64).reshape(4, 2) + 1).requires_grad_()
    weight = leaf * 1
    y = F.embedding_bag(torch.tensor([[0, 1, 2], [1, 1, 3]]), weight, mode=mode, **options)
    change(weight)
    return torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0].detach()


def _frozen_later():
    right, factor = (torch.ones(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = torch.cholesky_solve(right, factor)
    factor.requires_grad_(False)
    y.sum().backward()
    return right.grad


LATER = {
    "written to": lambda: _bag_changed_later(lambda w: w.mul_(3)),
    "other maxima": lambda: _bag_changed_later(lambda w: w.detach().neg_(), mode="max"),
    "detached": lambda: _bag_changed_later(lambda w: w.detach_()),
    "sparse": lambda: _bag_changed_later(lambda w: None, sparse=True).to_dense(),
    "frozen": _frozen_later,
}


@pytest.mark.parametrize("name", LATER)
def test_gradients_belong_to_what_an_argument_was_in_its_call(name):
    expected = LATER[name]()
    with pr.repair_torch():
        torch.testing.assert_close(LATER[name](), expected)


def test_in_place_operators_refuse_what_torch_refuses():
    with pr.repair_torch(), pytest.raises(RuntimeError, match="can't be cast"):
        torch.tensor([2.0]).pow_(torch.tensor([1 + 1j], requires_grad=True))


def test_a_backward_pass_within_hooks_of_saved_tensors_keeps_none_of_them():
    alive = []

    def keep(x):
        alive.append(weakref.ref(kept := _Kept(x)))
        return kept

    with pr.repair_torch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.x):
        x = torch.eye(2, dtype=torch.float64).requires_grad_()
        torch.cholesky_inverse(x * 1).sum().backward()
    del x
    assert alive
    assert not any(reference() for reference in alive)


@pytest.mark.parametrize("space", [F, pr.functional], ids=["torch", "primitives"])
def test_recorded_backward_passes_of_group_norm_take_batches(space):
    arguments = randn(2, 4, 4), randn(4), randn(4)
    hessian = functools.partial(
        torch.autograd.functional.hessian, lambda x, *affine: space.group_norm(x, 2, *affine).sin().sum()
    )
    with pr.repair_torch() if space is F else contextlib.nullcontext():
        torch.testing.assert_close(hessian(arguments, vectorize=True), hessian(arguments))


_ARGUMENTS = {
    **{"aten::t_": (), "aten::as_strided_": ((3, 2), (1, 3)), "aten::unsqueeze_": (-2,)},
    **{"aten::squeeze_": (), "aten::squeeze_.dim": (1,), "aten::squeeze_.dims": ([0, 1],)},
}


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_axes_of_a_batch_of_cotangents_change_in_place(name):
    method, args = name.removeprefix("aten::").partition(".")[0], _ARGUMENTS.get(name, (0, 1))
    sizes = (2, 3) if name == "aten::t_" else (2, 1, 3)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, y_bar):
            y = y_bar * 3
            getattr(y, method)(*args)
            assert y.shape == IN_PLACE[name](torch.empty(sizes), *args).shape
            return (y.sin() * y[..., :1]).sum() * torch.ones(sizes, dtype=y.dtype)

    x, cotangents = randn(*sizes).requires_grad_(), randn(4, *sizes).requires_grad_()
    with pr.repair_torch():
        found = torch.autograd.grad(Scaled.apply(x), x, cotangents, is_grads_batched=True, create_graph=True)[0]
        expected = torch.stack(
            [torch.autograd.grad(Scaled.apply(x), x, bar, create_graph=True)[0] for bar in cotangents]
        )
        torch.testing.assert_close(found, expected)
        bars = (torch.autograd.grad(y.cos().sum(), cotangents)[0] for y in (found, expected))
        torch.testing.assert_close(*bars)


def test_axes_of_batches_of_batches_change_in_place():
    def along(x, change):
        y = x * x * x
        y.register_hook(lambda y_bar: change(y_bar * x))
        bars = torch.stack([torch.eye(3), torch.ones(3, 3)]).double()
        return torch.autograd.grad(y, x, bars, is_grads_batched=True, create_graph=True)[0].sum(0)

    jacobian, x = torch.autograd.functional.jacobian, randn(3, 3).requires_grad_()
    with pr.repair_torch():
        expected = jacobian(lambda x: along(x, torch.t), x)
        found = jacobian(lambda x: along(x, torch.Tensor.t_), x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(found, expected)


def test_group_norm_has_parameters_alone():
    # Torch writes to no memory in the first case, and raises in the second.
    weight, bias = randn(4).requires_grad_(), randn(4).requires_grad_()
    x = randn(2, 4, 2, 3).contiguous(memory_format=torch.channels_last)
    for given in ((weight, bias), (None, bias)):
        wanted = [y for y in given if y is not None]
        with pr.repair_torch():
            found = torch.autograd.grad(F.group_norm(x, 2, *given).sin().sum(), wanted)
        torch.testing.assert_close(
            found, torch.autograd.grad(pr.functional.group_norm(x, 2, *given).sin().sum(), wanted)
        )


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False, "num_layers": 2}], ids=["", "stacked"])
def test_an_lstm_in_single_precision_has_forward_mode(options):
    torch.manual_seed(0)
    model, x, v = torch.nn.LSTM(4, 5, **options), *randn(2, 3, 2, 4).float()

    def gradient(model, x, v):
        names = dict(model.named_parameters())

        def loss(parameters):
            y = functools.partial(torch.func.functional_call, model, parameters)
            return torch.func.jvp(lambda x: y((x,))[0], (x,), (v,))[1].sin().sum()

        return torch.func.grad(loss)(names)

    with pr.repair_torch():
        found = gradient(model, x, v)
    expected = gradient(model.double(), x.double(), v.double())
    torch.testing.assert_close(found, {name: bar.float() for name, bar in expected.items()})


aten = torch.ops.aten
IMAGE, LINES, Q = (2, 4, 3, 3), (5, 4), (1, 2, 4, 3)
# Calls of the operators that primitives serve on a GPU in plain code too.
FUSED_CALLS = {
    aten.native_layer_norm.default: lambda r: (r(*IMAGE), [3, 3], r(3, 3), r(3, 3), 0.1),
    aten.native_group_norm.default: lambda r: (r(*IMAGE), r(4), None, 2, 4, 9, 2, 0.1),
    aten.native_batch_norm.default: lambda r: (r(*IMAGE), r(4), r(4), r(4), r(4).abs(), True, 0.2, 0.1),
    aten._native_batch_norm_legit.default: lambda r: (r(*LINES), None, None, r(4), r(4).abs(), False, 0.2, 0.1),
    aten._native_batch_norm_legit.no_stats: lambda r: (r(*IMAGE), r(4), r(4), True, 0.2, 0.1),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda r: (r(*Q), r(*Q), r(*Q), 0.0, True),
    aten.scaled_dot_product_attention.default: lambda r: (r(*Q), r(*Q), r(*Q), r(4, 4)),
    aten._fused_rms_norm.default: lambda r: (r(*IMAGE), [3, 3], r(3, 3), None),
}


@pytest.mark.parametrize("operator", FUSED, ids=str)
def test_primitives_give_what_torchs_operators_give(operator):
    # Torch has these for GPUs alone.
    like = {"cudnn_batch_norm": aten.native_batch_norm, "miopen_batch_norm": aten.native_batch_norm}
    torchs = like[operator._opname].default if operator._opname in like else operator
    torch.manual_seed(0)
    args = FUSED_CALLS[torchs](randn)
    twins = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    found, expected = FUSED[operator](*args), torchs(*twins)
    found, expected = ([y] if isinstance(y, torch.Tensor) else list(y) for y in (found, expected))
    torch.testing.assert_close(found[: len(expected)], expected, check_stride=False)
    torch.testing.assert_close(args, tuple(twins), msg="running statistics")


# Function, shapes of input, weight and bias, options.
BY_GROUPS = [
    (F.conv1d, (2, 6, 9), (6, 1, 3), 6, {"groups": 6, "padding": 1}),
    (F.conv2d, (2, 4, 6, 5), (8, 2, 3, 2), 8, {"groups": 2, "stride": (2, 1), "padding": 1, "dilation": (1, 2)}),
    (F.conv3d, (1, 4, 4, 4, 5), (4, 2, 2, 2, 3), 4, {"groups": 2}),
    (F.conv_transpose2d, (2, 4, 4, 5), (4, 3, 3, 2), 6, {"groups": 2, "stride": 2, "dilation": (1, 2)}),
]


@pytest.mark.parametrize("function, x, weight, bias, options", BY_GROUPS, ids=[f.__name__ for f, *_ in BY_GROUPS])
def test_convolutions_by_groups_are_differentiated_again_for_all_groups_at_once(function, x, weight, bias, options):
    leaves = x, weight, bias = [randn(*shape).requires_grad_() for shape in (x, weight, (bias,))]

    def derivatives(*wanted):
        first = torch.autograd.grad(function(*leaves, **options).sin().sum(), wanted, create_graph=True)
        loss = sum(y.square().sum() for y in first)
        second = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        again = sum(y.cos().sum() for y in second if y is not None)
        return [*second, *torch.autograd.grad(again, leaves, allow_unused=True)]

    for wanted in (leaves, [x], [weight], [bias], [weight, bias]):
        results, nums = [], []
        for context in (contextlib.nullcontext, pr.repair_torch):
            with torch.profiler.profile(acc_events=True) as profile, context():
                results.append(derivatives(*wanted))
            nums.append(sum(event.name.startswith("aten::convolution") for event in profile.events()))
        for truth, found in zip(*results, strict=True):
            assert truth is found is None or torch.allclose(found, truth, rtol=1e-11, atol=1e-11)
        assert nums[1] < nums[0] or options["groups"] == 2 or wanted[0] is bias


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_with_output_padding_have_third_derivatives(groups):
    def first(x, weight):
        y = F.conv_transpose2d(x, weight, groups=groups, stride=2, output_padding=1)
        return torch.autograd.grad(y.sin().sum(), (x, weight), create_graph=True)

    with pr.repair_torch():
        assert torch.autograd.gradgradcheck(
            first, (randn(1, 2, 2, 2).requires_grad_(), randn(2, 1, 2, 2).requires_grad_())
        )
