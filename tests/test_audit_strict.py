"""`audit(strict=True)`: it names the module, the line and the exception of a derivative that is wrong."""

import functools

import pytest
import torch
from torch import nn

import primitives as pr
from tests.test_audit import model


@pytest.mark.parametrize("converted", [False, True])
def test_strict_holds_the_whole_against_differences(converted):
    net = pr.nn.convert(model()) if converted else model()
    report = pr.audit(net, (torch.randn(3, 4),), strict=True)
    assert set(report.failed) == (set() if converted else {"ff", "rf"})
    assert set(report.errors) == {"f", "r", "ff", "fr", "rf", "rr"}
    assert report.ok == converted


def of_user(name, forward, **rules):
    """An `autograd.Function` of one argument, which its rules have."""

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    members = {"forward": forward, "setup_context": keep, **rules}
    return type(name, (torch.autograd.Function,), {key: staticmethod(rule) for key, rule in members.items()})


def test_strict_knows_of_the_rules_of_the_user_what_the_table_does_not():
    def slope(ctx, bar_or_dot):
        return bar_or_dot * ctx.saved_tensors[0].cos()

    factors = [1.01]
    rule = of_user("Sine", lambda x: x.sin(), backward=slope, jvp=lambda ctx, x_dot: factors[-1] * slope(ctx, x_dot))

    def sine(x):
        return rule.apply(x)

    report = pr.audit(sine, (torch.randn(3),), order=1, strict=True)
    assert report.failed == ("f",)
    assert "WRONG" in str(report)
    assert [finding.operation for finding in report.findings] == ["function sine"]
    assert "autograd.Function Sine" not in report.right
    factors.append(1.0)
    assert not pr.audit(sine, (torch.randn(3),), order=1)
    assert pr.audit(sine, (torch.randn(3),), order=1, strict=True)


class Cut(nn.Module):
    def forward(self, y):
        return y / y.detach().norm()


class Net(nn.Module):
    """Wrong in one place; the repeated ReLU has zeros, where its derivative jumps."""

    def __init__(self, part):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.ReLU(), part), nn.Linear(4, 4))

    def forward(self, x, *, scale):
        return self.blocks(scale * x)


def line_of(function):
    return f"{function.__code__.co_firstlineno + 1} in {function.__name__}"


@pytest.mark.parametrize("is_a_function", [False, True])
@pytest.mark.parametrize(
    "cut, reason", [(Cut(), "uses a detached tensor"), (None, "makes a Python number of a tensor")]
)
def test_strict_names_the_module_and_the_line_of_a_derivative_that_is_cut(cut, reason, is_a_function):
    class Number(nn.Module):
        def forward(self, y):
            return y * y.sum().item()

    torch.manual_seed(0)
    cut = cut or Number()
    net, x = Net(cut), torch.randn(3, 4)
    function = (lambda x, scale: net(x, scale=scale)) if is_a_function else net
    report = pr.audit(function, (x,), {"scale": 2.0}, order=1, strict=True)
    (finding,) = report.findings
    name = type(cut).__name__
    assert finding.operation == f"module {name if is_a_function else f'blocks.2.1 ({name})'}"
    assert finding.wrong == ("jvp", "vjp")
    (place,) = finding.places
    assert place.endswith(f"{line_of(type(cut).forward)}: {reason}")
    assert "wrong, missing or not known: 1" in str(report)
    assert not torch.nn.modules.module._has_any_global_hook()


def test_strict_names_the_exception_and_its_line_and_what_else_stands_there():
    def backward(ctx, y_bar):
        raise ValueError(f"no {ctx}" + "\nnor this")

    def double(ctx, bar_or_dot):
        return bar_or_dot * 2

    raising = of_user("Raising", lambda x: x.sin(), backward=backward)
    right = of_user("Right", lambda x: x * 2, backward=double, jvp=double)

    class Once(nn.Module):
        def forward(self, x):
            return raising.apply(x)

    class Twice(nn.Module):
        def forward(self, x):
            return right.apply(x)

    report = pr.audit(nn.Sequential(Twice(), Once()), (torch.randn(2, 3),), order=1, strict=True)
    lacking, module = report.findings
    assert (lacking.operation, lacking.raises) == ("autograd.Function Raising", ("jvp",))
    assert (module.operation, module.raises, module.wrong) == ("module 1 (Once)", ("vjp",), ())
    assert "autograd.Function Raising" in next(iter(module.places))
    (note,) = module.notes
    assert note.startswith("vjp: raises ValueError: no <")
    assert "test_audit_strict.py" in note
    assert note.endswith("in backward)")
    assert "autograd.Function Right" in report.right
    assert not any("strict=True" in finding.remedy for finding in report.findings)


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


def penalty(critic, x):
    """Of Wasserstein critics, as people write it."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.norm(dim=-1) - 1) ** 2).mean()


def test_a_loss_that_takes_a_gradient_is_judged_in_the_parameters_that_it_reaches():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 1)), torch.randn(3, 4)
    losses = [(functools.partial(penalty, net, x), ()), (functools.partial(penalty, x=x), (net,))]
    for loss, args in losses:
        assert pr.audit(loss, args, order=1), "torch has this derivative of the norm's backward pass right"
        assert pr.audit(loss, args, order=1, strict=True)
        assert {f.remedy for f in pr.audit(loss, args).findings} == {"pr.repair_torch()"}
        with pr.repair_torch():
            assert pr.audit(loss, args)
            assert pr.audit(loss, args, strict=True)
    *_, finding = pr.audit(*losses[0], order=3, strict=True).findings
    assert (finding.operation, finding.remedy) == ("function penalty", "pr.repair_torch()")
    assert [place.split()[-1] for place in finding.places] == ["aten.native_layer_norm_backward.default"]
    with pr.repair_torch():
        (finding,) = pr.audit(penalty, (net, x), order=1, strict=True).findings
    assert "functools.partial" in finding.remedy
    assert any("uses a detached tensor" in place for place in finding.places)


def test_a_function_that_no_derivative_reaches_is_no_right_one():
    (finding,) = pr.audit(lambda x: x.detach().exp(), (torch.randn(3),)).findings
    assert "no operation was reached" in finding.remedy
