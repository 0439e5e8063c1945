"""The second-order batch norm launchers, run in Triton's interpreter, against torch's derivatives of a formula."""

from __future__ import annotations

import pytest
import torch

import primitives as pr
import primitives.ops.batch_norm_second_order
from tests.kernels.batch_norm_truth import TOLERANCES, check_eval, check_train, positive, random, stat_dtype
from triton_kernels import batch_norm_second_order
from triton_kernels.batch_norm_second_order import batch_norm_bwd_jvp, batch_norm_pairing

# Large enough that the mean square of x_hat is visibly not 1.
EPS = 1e-2


def formula(x, weight, bias, batch_ndim=0, eps=EPS):
    """Batch norm in training."""
    axes = (batch_ndim, *range(batch_ndim + 2, x.dim()))

    def wide(param):
        return param.reshape(*param.shape[:-1], 1, param.shape[-1], *[1] * (x.dim() - batch_ndim - 2))

    mean = x.mean(axes, keepdim=True)
    var = (x - mean).square().mean(axes, keepdim=True)
    return (x - mean) / (var + eps).sqrt() * wide(weight) + wide(bias)


class Case:
    """Operands of both launchers, some of them absent, and the exact results."""

    def __init__(self, x, batch_ndim=0, param_dtype=None, absent=(), **given):
        self.x, self.batch_ndim = x, batch_ndim
        channels = x.shape[:batch_ndim] + x.shape[batch_ndim + 1 : batch_ndim + 2]
        param_dtype = param_dtype or stat_dtype(x)
        full = {name: random(*x.shape, dtype=x.dtype, seed=seed) for seed, name in enumerate(self.FULL, 1)}
        small = {name: random(*channels, dtype=param_dtype, seed=seed) for seed, name in enumerate(self.SMALL, 5)}
        self.operands = {**full, **small, **given, **dict.fromkeys(absent)}
        self.channels = channels
        axes = (batch_ndim, *range(batch_ndim + 2, x.dim()))
        var, mean = torch.var_mean(x.double(), axes, correction=0)
        self.stats = mean.to(stat_dtype(x)), ((var + EPS) ** -0.5).to(stat_dtype(x))
        weight = self.operands["weight"]
        self.param_dtype = x.dtype if weight is None else weight.dtype

    FULL = ("y_bar", "x_dot", "y_bar_dot")
    SMALL = ("weight", "weight_dot", "bias_dot")

    def pick(self, *names):
        return tuple(self.operands[name] for name in names)

    def exact(self, *names):
        """Operands in float64; absent ones are 0, an absent weight is 1."""
        for name in names:
            operand = self.operands[name]
            shape = self.x.shape if name in self.FULL else self.channels
            default = torch.ones if name == "weight" else torch.zeros
            yield default(shape, dtype=torch.float64) if operand is None else operand.double()

    def pairing(self, wanted=(True,) * 6):
        tangents = self.pick("x_dot", "weight_dot", "bias_dot")
        (y_bar, weight), (mean, rstd) = self.pick("y_bar", "weight"), self.stats
        return batch_norm_pairing(y_bar, self.x, weight, mean, rstd, *tangents, self.batch_ndim, wanted)

    def bwd_jvp(self, wanted=(True,) * 3):
        tangents = self.pick("y_bar_dot", "x_dot", "weight_dot")
        (y_bar, weight), (mean, rstd) = self.pick("y_bar", "weight"), self.stats
        return batch_norm_bwd_jvp(y_bar, self.x, weight, mean, rstd, *tangents, self.batch_ndim, wanted)

    def exact_pairing(self):
        bias = torch.zeros(self.channels, dtype=torch.float64)

        def pairing(y_bar, x, weight, *dots):
            def batch_norm(x, weight, bias):
                return formula(x, weight, bias, self.batch_ndim)

            return (y_bar * torch.func.jvp(batch_norm, (x, weight, bias), dots)[1]).sum()

        y_bar, weight, *dots = self.exact("y_bar", "weight", "x_dot", "weight_dot", "bias_dot")
        return torch.func.grad(pairing, tuple(range(6)))(y_bar, self.x.double(), weight, *dots)

    def exact_bwd_jvp(self):
        bias = torch.zeros(self.channels, dtype=torch.float64)

        def backward(y_bar, x, weight):
            return torch.func.vjp(lambda *args: formula(*args, self.batch_ndim), x, weight, bias)[1](y_bar)

        y_bar, weight, *dots = self.exact("y_bar", "weight", "y_bar_dot", "x_dot", "weight_dot")
        return torch.func.jvp(backward, (y_bar, self.x.double(), weight), tuple(dots))[1]

    def check(self, pairing_wanted=(True,) * 6, bwd_jvp_wanted=(True,) * 3):
        small, full = self.param_dtype, self.x.dtype
        results = (
            (self.pairing(pairing_wanted), self.exact_pairing(), (full, full, small, full, small, small)),
            (self.bwd_jvp(bwd_jvp_wanted), self.exact_bwd_jvp(), (full, small, small)),
        )
        for (actual, expected, dtypes), wanted in zip(results, (pairing_wanted, bwd_jvp_wanted), strict=True):
            for result, number, dtype, is_wanted in zip(actual, expected, dtypes, wanted, strict=True):
                if is_wanted:
                    self.assert_close(result, number, dtype)
                else:
                    assert result.shape == (0,)
        return results[0][0], results[1][0]

    def assert_close(self, actual, expected, dtype):
        assert actual.dtype == dtype
        # Sums of products over a channel: their rounding is that of the terms, not of what is left of them.
        num_reduced = self.x.numel() // max(self.channels.numel(), 1)
        scale = max(expected.abs().max().item(), num_reduced if expected.shape == self.channels else 1.0)
        atol = (TOLERANCES[dtype] * max(expected.abs().max().item(), 1.0)) + 4 * TOLERANCES[stat_dtype(self.x)] * scale
        torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=atol)


def channels_last(*shape, **options):
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return random(*shape, **options).contiguous(memory_format=memory_format)


LAYOUTS = {
    "features": lambda: random(19, 5),
    "features_transposed": lambda: random(5, 19).t(),
    "sequence": lambda: random(4, 3, 33),
    "sequence_short": lambda: random(9, 5, 3),
    "image": lambda: random(3, 3, 6, 7),
    "image_one_sample": lambda: random(1, 3, 8, 8),
    "image_one_pixel": lambda: random(19, 5, 1, 1),
    "image_channels_last": lambda: channels_last(3, 3, 6, 7),
    "image_many_channels_last": lambda: channels_last(2, 37, 2, 3),
    "image_sliced_samples": lambda: random(6, 7, 6, 7)[::2, 1:4],
    "image_cropped": lambda: random(3, 3, 8, 9)[:, :, 1:7, 1:8],
    "image_expanded_samples": lambda: random(1, 3, 6, 7).expand(3, -1, -1, -1),
    "volume_channels_last": lambda: channels_last(2, 3, 4, 3, 5),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(make):
    x = make()
    pairing, (x_bar_dot, _, _) = Case(x).check()
    expected = torch.nn.functional.batch_norm(x, None, None, training=True).stride()
    assert [out.stride() for out in (*pairing[:2], pairing[3], x_bar_dot)] == [expected] * 4


@pytest.mark.parametrize("other", LAYOUTS.values(), ids=LAYOUTS)
def test_operands_of_other_layout(other):
    operand = other()
    x = random(*operand.shape, seed=11)
    if x.dim() == 4 and operand.stride(1) != 1:
        x = x.contiguous(memory_format=torch.channels_last)
    Case(x, y_bar=operand).check()
    Case(x, x_dot=operand, y_bar_dot=operand).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, param_dtype):
    Case(random(6, 2, 4, 5, dtype=dtype), param_dtype=param_dtype).check()


@pytest.mark.parametrize("shape, batch_ndim", [((6, 3, 4, 5), 0), ((19, 5), 0), ((2, 6, 3, 5), 1)], ids=str)
def test_bfloat16_parameters_of_float64_input_in_first_order(shape, batch_ndim):
    x = random(*shape, dtype=torch.float64)
    channels = (*shape[:batch_ndim], shape[batch_ndim + 1])
    weight, bias, mean = (random(*channels, dtype=torch.bfloat16, seed=seed) for seed in (1, 2, 3))
    params = (weight, bias, mean, positive(*channels, dtype=torch.bfloat16, seed=4))
    check_train(x, *params, batch_ndim)
    check_eval(x, *params, batch_ndim)


@pytest.mark.parametrize("make", [lambda: random(6, 2, 40, 41), lambda: channels_last(6, 3, 20, 21)])
def test_float64_has_its_digits(make):
    case = Case(make().double())
    for actual, expected in ((case.pairing(), case.exact_pairing()), (case.bwd_jvp(), case.exact_bwd_jvp())):
        for result, number in zip(actual, expected, strict=True):
            torch.testing.assert_close(result, number, rtol=0.0, atol=1e-12 * number.abs().max().item())


@pytest.mark.parametrize("layout", ["features", "sequence", "image", "image_channels_last"])
def test_many_tiles_and_splits(use_limits, use_processors, layout):
    # Fewer programs than tiles, so that each loops; more than one, so that there is something to merge.
    use_limits(channel_tile_bytes=512)
    use_processors(2)
    Case(LAYOUTS[layout]()).check()


ABSENT = [
    (),
    ("weight",),
    ("x_dot",),
    ("weight_dot",),
    ("bias_dot",),
    ("y_bar_dot",),
    ("weight", "weight_dot"),
    ("x_dot", "weight_dot"),
    ("x_dot", "bias_dot", "weight"),
    ("weight_dot", "y_bar_dot", "bias_dot"),
    ("x_dot", "y_bar_dot"),
    ("x_dot", "weight_dot", "bias_dot", "y_bar_dot"),
]


# Each result alone, all but each, and what the rules of the first-order operators ask for.
def masks(count):
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    return [*alone, *(tuple(not want for want in mask) for mask in alone), (False,) * count, (True,) * count]


@pytest.mark.parametrize("absent", ABSENT, ids="-".join)
def test_absent_operands_and_unwanted_results(absent):
    case = Case(random(4, 3, 5), absent=absent)
    bwd_jvp_masks = masks(3)
    for index, wanted in enumerate([*masks(6), (True, True, True, False, False, False)]):
        case.check(wanted, bwd_jvp_masks[index % len(bwd_jvp_masks)])


@pytest.mark.parametrize("expanded", ["none", "params", "x"])
@pytest.mark.parametrize("rest", [(6, 3), (3, 3, 5), (3, 2, 4, 5)])
def test_batch_dims(rest, expanded):
    x = random(*rest).expand(3, *rest) if expanded == "x" else random(3, *rest)
    params = {}
    if expanded == "params":
        # Of the three, one stays strided between groups.
        params = {name: random(rest[1]).expand(3, rest[1]) for name in ("weight", "bias_dot")}
    Case(x, 1, **params).check()
    Case(x[0], 0).check()


def test_runs_are_bitwise_equal():
    case = Case(random(30, 2, 16, 16))
    for first, second in zip((*case.pairing(), *case.bwd_jvp()), (*case.pairing(), *case.bwd_jvp()), strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
@pytest.mark.parametrize("shape", [(0, 5), (0, 5, 4, 4), (3, 5, 0), (3, 0, 4)])
def test_no_elements(shape):
    case = Case(torch.empty(shape))
    zeros = torch.zeros(shape[1])
    y_bar_bar, x_bar, weight_bar, x_dot_bar, *sums = case.pairing()
    x_bar_dot, *sum_dots = case.bwd_jvp()
    assert all(out.shape == shape for out in (y_bar_bar, x_bar, x_dot_bar, x_bar_dot))
    assert all(torch.equal(out, zeros) for out in (weight_bar, *sums, *sum_dots))


def test_one_element():
    Case(random(1, 1)).check()


def test_infinite_operands_without_a_factor_do_not_spread():
    case = Case(random(4, 3, 5), absent=("x_dot", "weight_dot"), y_bar=torch.full((4, 3, 5), torch.inf))
    y_bar_bar, x_bar, *_ = case.pairing((True, True, False, False, False, False))
    assert torch.equal(x_bar, torch.zeros(4, 3, 5))
    assert torch.equal(y_bar_bar, case.operands["bias_dot"].view(3, 1).expand(4, 3, 5))
    _, weight_bar_dot, _ = case.bwd_jvp()
    assert weight_bar_dot.isfinite().all()


def derivatives(batch_norm, x, weight, bias, probe, v):
    """Second derivatives of a loss, by route."""

    def loss(x, weight, bias):
        y = batch_norm(x, weight, bias)
        return (y.sin() * probe).sum() + (y**3).sum()

    def directional(*args):
        return torch.func.jvp(loss, args, v)[1]

    args, every = (x, weight, bias), (0, 1, 2)
    grad = torch.func.grad(loss, every)

    def slope(*args):
        return sum((bar * dot).sum() for bar, dot in zip(grad(*args), v, strict=True))

    yield "grad(grad)", torch.func.grad(slope, every)(*args)
    yield "jvp(grad)", torch.func.jvp(grad, args, v)[1]
    yield "grad(jvp)", torch.func.grad(directional, every)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", [lambda: random(9, 4), lambda: random(3, 2, 4, 5), lambda: channels_last(2, 3, 4, 3)])
def test_second_derivatives_through_the_primitives(make, dtype, monkeypatch):
    launched = []
    for name in ("batch_norm_pairing", "batch_norm_bwd_jvp"):
        launcher = getattr(batch_norm_second_order, name)

        def recorded(*args, name=name, launcher=launcher):
            launched.append(name)
            return launcher(*args)

        monkeypatch.setattr(batch_norm_second_order, name, recorded)

    x = make().to(dtype)
    weight, bias, *dots = (random(x.shape[1], dtype=dtype, seed=seed) for seed in range(1, 5))
    args = (x, weight, bias, random(*x.shape, dtype=dtype, seed=5))
    v = (random(*x.shape, dtype=dtype, seed=6), *dots)

    def batch_norm(x, weight, bias):
        return pr.functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)

    exact = derivatives(formula, *(arg.double() for arg in args), tuple(dot.double() for dot in v))
    with pr.use_backend("triton"):
        actual = list(derivatives(batch_norm, *args, v))
    for (what, results), (_, numbers) in zip(actual, exact, strict=True):
        for result, number in zip(results, numbers, strict=True):
            assert result.dtype == dtype
            error = (result.double() - number).abs().max() / max(number.abs().max(), 1.0)
            assert error < (1e-12 if dtype == torch.float64 else 1e-4), what
    assert set(launched) == {"batch_norm_pairing", "batch_norm_bwd_jvp"}
