"""`audit`: what it finds in models and functions, and that the table of torch's derivatives says what torch does."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import primitives as pr
from perf import torch_derivatives
from primitives._audit import table
from tests.custom_ops import NAMESPACE, Affine


def found(report):
    return {finding.operation: finding for finding in report.findings}


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_a_norm_of_torch_is_found_with_its_place_and_its_remedy_makes_it_right():
    net, x = model(), torch.randn(3, 4)
    report = pr.audit(net, (x,))
    norm = found(report)["aten.native_layer_norm.default"]
    assert (set(norm.wrong), norm.raises) == ({"jvp(jvp)", "vjp(jvp)"}, ())
    (place,) = norm.places
    assert place.startswith("1 (LayerNorm), ")
    assert "test_audit.py" in place
    assert type(norm) is pr.Finding
    assert not report
    for text in (norm.remedy, place, "silently wrong: jvp(jvp), vjp(jvp)"):
        assert text in str(report)
    assert pr.audit(net, (x,), order=1).ok
    assert pr.audit(pr.nn.convert(net), (x,), order=3).ok
    with pr.override_torch():
        assert pr.audit(model(), (x,), order=3).ok


def test_attention_raises_and_is_right_by_the_remedies():
    q = torch.randn(1, 2, 4, 3)
    (finding,) = pr.audit(F.scaled_dot_product_attention, (q, q, q), order=1).findings
    assert finding.raises == ("jvp",)
    assert "MATH" in finding.remedy
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert pr.audit(F.scaled_dot_product_attention, (q, q, q)).ok
    assert pr.audit(pr.functional.scaled_dot_product_attention, (q, q, q)).ok


def test_trees_of_nodes_and_arguments_by_keyword_are_taken():
    params = Affine(torch.ones(3), torch.randn(2, 3))

    def norm(params, *, order):
        return Affine(F.layer_norm(params.bias, (3,), params.weight)), order

    report = pr.audit(norm, (params,), {"order": 3}, strict=True, namespace=NAMESPACE)
    assert [*found(report)] == ["aten.native_layer_norm.default"]
    assert "rf" in report.failed
    with pytest.raises(TypeError, match="args must be the tuple"):
        pr.audit(norm, params)


def test_only_what_depends_on_the_inputs_counts():
    constant = torch.randn(2, 3)
    assert pr.audit(lambda x: x * F.layer_norm(constant, (3,)), (torch.randn(2, 3),)).ok
    assert not pr.audit(lambda x: F.layer_norm(constant.add_(x), (3,)), (torch.randn(2, 3),)).ok


def test_numbers_that_are_drawn_with_a_derivative_count():
    report = pr.audit(
        lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample() * torch.rand_like(x), (torch.randn(3),)
    )
    assert [*found(report)] == ["aten._standard_gamma.default"]


@pytest.mark.parametrize(
    "before, is_found",
    [
        # Autograd detaches results that it saves.
        (lambda x: x.exp().relu(), True),
        (lambda x: x.mul(2).detach().add_(x), True),
        (lambda x: (x, x.detach())[0], True),
        (lambda x: x.mul(2).detach(), False),
        (lambda x: x.mul(2).detach()[:, :3].clone(), False),
        (lambda x: x.mul(2).data.tanh(), False),
    ],
)
def test_what_is_detached_and_nothing_else_counts_as_constant(before, is_found):
    report = pr.audit(lambda x: x * F.layer_norm(before(x), (3,)), (torch.randn(2, 3),))
    assert ("aten.native_layer_norm.default" in found(report)) == is_found


def test_functions_and_operators_of_others_are_found():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, y_bar):
            return 3 * ctx.saved_tensors[0] ** 2 * y_bar

    @torch.library.custom_op("audited::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def cube(x):
        return Cube.apply(x)

    report = pr.audit(lambda x: cube(x) + twice(x), (torch.randn(3),))
    ((place, calls),) = found(report)["autograd.Function Cube"].places.items()
    assert calls == 1
    assert "test_audit.py" in place
    assert place.endswith("in cube"), "not the line of its forward"
    assert set(found(report)) == {"autograd.Function Cube", "audited.twice.default"}
    assert set(found(report)["autograd.Function Cube"].raises) == {
        *("jvp", "jvp(jvp)", "jvp(vjp)", "vjp(jvp)", "vjp(vjp)")
    }
    assert "not known" in str(report)


@pytest.mark.parametrize("converted", [False, True])
def test_strict_holds_the_whole_against_differences(converted):
    net = pr.nn.convert(model()) if converted else model()
    report = pr.audit(net, (torch.randn(3, 4),), strict=True)
    assert set(report.failed) == (set() if converted else {"ff", "rf"})
    assert set(report.errors) == {"f", "r", "ff", "fr", "rf", "rr"}
    assert report.ok == converted


def test_strict_knows_of_the_rules_of_the_user_what_the_table_does_not():
    class Sine(torch.autograd.Function):
        factor = 1.01

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, y_bar):
            return y_bar * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, x_dot):
            return Sine.factor * x_dot * ctx.saved_tensors[0].cos()

    def sine(x):
        return Sine.apply(x)

    report = pr.audit(sine, (torch.randn(3),), order=1, strict=True)
    assert report.failed == ("f",)
    assert "WRONG" in str(report)
    Sine.factor = 1.0
    assert not pr.audit(sine, (torch.randn(3),), order=1)
    assert pr.audit(sine, (torch.randn(3),), order=1, strict=True)


def test_strict_judges_a_function_that_torch_func_refuses():
    """One in the old style, whose forward takes the context: by `torch.autograd`, which has no jvp of a jvp."""

    class Sine(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return F.layer_norm(x, (3,)) * 0 + x.sin()

        @staticmethod
        def backward(ctx, y_bar):
            return Sine.factor * y_bar * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, x_dot):
            return x_dot * ctx.saved_tensors[0].cos()

    net = nn.Linear(3, 3)

    def function(x):
        return Sine.apply(net(x)).exp()

    (finding,) = pr.audit(function, (torch.randn(2, 3),)).findings
    assert finding.raises == ("jvp(jvp)",)
    assert "setup_context" in finding.remedy
    assert pr.audit(function, (torch.randn(2, 3),), order=1, strict=True)
    assert pr.audit(function, (torch.randn(2, 3),), strict=True).failed == ("ff",)
    Sine.factor = 1.01
    assert pr.audit(function, (torch.randn(2, 3),), order=1, strict=True).failed == ("r",)


def test_strict_is_misled_neither_by_kinks_nor_by_float32_inside():
    class InFloat32(nn.Module):
        def forward(self, x):
            return (x.float().relu() + x.softmax(-1, dtype=torch.float32)).to(x.dtype)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5_000), InFloat32(), nn.Linear(5_000, 2))
    assert pr.audit(net, (torch.randn(3, 4),), strict=True)


def test_strict_takes_steps_that_fit_the_numbers_and_leaves_casts_out():
    assert pr.audit(lambda x: x.log().sum(), (torch.tensor([1e-5, 1.0]),), strict=True)
    assert pr.audit(lambda x: (x**3).sum(), (torch.tensor([1e8, -3e8]),), strict=True)
    assert pr.audit(lambda x: x.to(torch.bfloat16).tanh().sum() + x.half().sum(), (torch.randn(4),), strict=True)
    with pytest.raises(ValueError, match="floating-point result"):
        pr.audit(lambda x: x.argmax(), (torch.randn(2),), strict=True)


def test_the_model_is_left_as_it_was():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, state = torch.randn(3, 4), torch.get_rng_state()
    pr.audit(net, (x,), strict=True, order=1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_wrong_calls_say_so():
    with pytest.raises(ValueError, match="order must be between 1 and 3, got 4"):
        pr.audit(model(), (torch.randn(3, 4),), order=4)
    with pytest.raises(pr.LeafError, match="to differentiate"):
        pr.audit(torch.sum, (torch.arange(3),))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes of exceptions came with Python 3.11")
def test_errors_of_torch_get_the_remedy_as_a_note_once():
    q = torch.randn(1, 1, 2, 2)

    def attention(q):
        return F.scaled_dot_product_attention(q, q, q)

    def tangent(q):
        return pr.func.jvp(attention, (q,), (q,))[1]

    for call in (lambda: tangent(q), lambda: pr.func.jvp(tangent, (q,), (q,)), lambda: pr.audit(tangent, (q,))):
        with pytest.raises(NotImplementedError, match="forward AD") as caught:
            call()
        (note,) = caught.value.__notes__
        assert "override_torch" in note


# The table.


def test_inputs_with_other_derivatives_have_rows_of_their_own():
    """Torch's jvp of a product is silently 0."""
    index, x = torch.tensor([0, 1, 1]), torch.tensor([1.0, 0.0, 2.0])
    for reduce, is_wrong in (("prod", True), ("sum", False)):
        report = pr.audit(lambda x, r=reduce: x.clone().scatter_reduce_(0, index, x, r), (x,), order=1)
        assert [finding.wrong for finding in report.findings] == [("jvp",)] * is_wrong
    for start, is_wrong in ((x, True), (x + 1, False)):
        assert bool(pr.audit(lambda x: (x * 1).cumprod_(0), (start,)).findings) == is_wrong


@pytest.fixture(scope="module")
def calls():
    """The calls that the table's script makes beside torch's database."""
    return torch_derivatives.recorded(database=())


RIGHT_THROUGH_DECOMPOSITIONS = (
    *("aten.native_group_norm.default channels_last", "aten._weight_norm_interface.default"),
    *("aten.cumprod.default zeros", "aten.sinc.default zeros", "aten.logaddexp.default infinite"),
)


def test_the_table_says_what_torch_does(calls):
    assert set(calls) >= set(RIGHT_THROUGH_DECOMPOSITIONS)
    for name, of_name in calls.items():
        verdicts = torch_derivatives.verdicts_of(of_name)
        wrong, raises = (tuple(n for n, v in (verdicts or {}).items() if v == kind) for kind in ("wrong", "raises"))
        if torch.__version__.startswith(table.tabled_version()) and verdicts:
            assert table.verdict_of(name) == (wrong, raises), name


def test_the_remedy_for_decomposed_operators_makes_them_right(calls):
    for name in RIGHT_THROUGH_DECOMPOSITIONS:
        with pr.decompositions.differentiate_through():
            verdicts = torch_derivatives.verdicts_of(calls[name])
        assert set(verdicts.values()) == {"right"}, name


class Remembering(torch.nn.Module):
    """Keeps its last result, as models of recurrent layers do, and assigns to slices."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.state = None

    def forward(self, x):
        self.state = self.linear(x).sin()
        y = torch.empty_like(x).zero_()
        y[0] = self.state[0] + self.state.sum(0)
        return y


def test_a_module_that_keeps_its_result_is_audited_strictly():
    model = Remembering()
    report = pr.audit(model, (torch.randn(2, 3),), strict=True)
    assert report, report
    assert model.state is None
    assert pr.audit(model, (torch.randn(2, 3),)), "slices are assigned to"
