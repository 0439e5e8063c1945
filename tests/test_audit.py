"""`audit`: what it finds in models and functions, and that the table of torch's derivatives says what torch does."""

import linecache
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import primitives as pr
from perf import torch_derivatives
from primitives._audit import table
from primitives.testing import Row
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
    assert norm.remedy == "pr.repair_torch()"
    with pr.repair_torch():
        repaired = pr.audit(net, (x,), order=3, strict=True)
    assert repaired.ok
    assert "with pr.repair_torch()" in str(repaired)
    assert not pr.audit(net, (x,)).ok, "the repair has ended"


def test_attention_raises_and_is_right_by_the_remedy():
    q = torch.randn(1, 2, 4, 3)
    (finding,) = pr.audit(F.scaled_dot_product_attention, (q, q, q), order=1).findings
    assert finding.raises == ("jvp",)
    assert finding.remedy == "pr.repair_torch()"
    with pr.repair_torch():
        assert pr.audit(F.scaled_dot_product_attention, (q, q, q)).ok
    assert pr.audit(pr.functional.scaled_dot_product_attention, (q, q, q)).ok


def test_trees_of_nodes_and_arguments_by_keyword_are_taken():
    params = Affine(torch.ones(3), torch.randn(2, 3))

    def norm(params, *, order):
        return Affine(F.layer_norm(params.bias, (3,), params.weight)), order

    report = pr.audit(norm, (params,), {"order": 3}, strict=True, namespace=NAMESPACE)
    assert [*found(report)] == ["aten.native_layer_norm.default"]
    assert "rf" in report.failed
    with pytest.raises(TypeError, match=r"args must be a tuple of the arguments, got Affine. Write \(x,\)"):
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
    assert [finding.operation for finding in report.findings] == ["function sine"]
    assert "autograd.Function Sine" not in report.right
    Sine.factor = 1.0
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


def unscaled(y):
    with torch.no_grad():
        return y / 2


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


def test_strict_names_a_module_with_a_fault_beside_one_that_the_table_knows():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(x) * unscaled(x)

    report = pr.audit(nn.Sequential(Around(), nn.Linear(4, 2)), (torch.randn(3, 4),), strict=True)
    norm, around = report.findings
    assert (norm.operation, *norm.wrong) == ("aten.native_layer_norm.default", "jvp(jvp)", "vjp(jvp)")
    assert around.operation == "module 0 (Around)"
    assert set(around.wrong) == {"vjp", "jvp(vjp)", "vjp(vjp)"}, "no_grad leaves tangents, and the rest is the norm's"
    assert any("runs under no_grad" in place for place in around.places)


def test_strict_names_the_exception_and_its_line_and_what_else_stands_there():
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, y_bar):
            raise ValueError(f"no {ctx}" + "\nnor this")

    class Right(Raising):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def backward(ctx, y_bar):
            return y_bar * 2

        @staticmethod
        def jvp(ctx, x_dot):
            return x_dot * 2

    class Once(nn.Module):
        def forward(self, x):
            return Raising.apply(x)

    class Twice(nn.Module):
        def forward(self, x):
            return Right.apply(x)

    report = pr.audit(nn.Sequential(Twice(), Once()), (torch.randn(2, 3),), order=1, strict=True)
    lacking, module = report.findings
    assert (lacking.operation, lacking.raises) == ("autograd.Function Raising", ("jvp",))
    assert (module.operation, module.raises, module.wrong) == ("module 1 (Once)", ("vjp",), ())
    assert "autograd.Function Raising" in next(iter(module.places))
    (note,) = module.notes
    assert note.startswith("vjp: raises ValueError: no <")
    assert "test_audit.py" in note
    assert note.endswith("in backward)")
    assert "autograd.Function Right" in report.right
    assert not any("strict=True" in finding.remedy for finding in report.findings)


@pytest.mark.parametrize(
    "file, shell",
    [("<ipython-input-3-0a1b>", "<frozen runpy>"), ("/tmp/ipykernel_99/27.py", "/x/ipykernel/kernelbase.py")],
)
def test_a_cell_of_a_notebook_is_named_and_the_shell_is_not(file, shell):
    cell = (
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x.detach() * torch.special.i1(x)\n"
    )
    scope = {"__name__": "__main__", "pr": pr, "torch": torch}
    linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
    exec(compile(cell, file, "exec"), scope)
    for place in ("/site/IPython/core/interactiveshell.py", shell):
        exec(compile("def run(f, *args, **kw):\n    return f(*args, **kw)", place, "exec"), scope)
        audit, scope["audit"] = scope.get("audit", pr.audit), None
        inner = scope["run"]
        scope["audit"] = lambda *args, audit=audit, inner=inner, **kw: inner(audit, *args, **kw)
    report = scope["audit"](scope["M"](), (torch.randn(3),), order=3, strict=True)
    for finding in report.findings:
        (place,) = finding.places
        assert f"{file.removeprefix('/')}:4 in forward: return x.detach() * torch.special.i1(x)" in place.replace(
            "tmp/", "tmp/"
        )
        assert place.startswith("M, cell ")
    ((place, _),) = scope["audit"](nn.LayerNorm(3), (torch.randn(2, 3),)).findings[0].places.items()
    assert "test_audit.py" in place, "the shell is not the user"


def test_reports_are_tables_in_a_notebook_and_text_elsewhere():
    report = pr.audit(lambda x: F.layer_norm(x, (3,)), (torch.randn(2, 3),), strict=True)
    text = report._repr_html_()
    assert repr(report) == str(report)
    assert text.count("<tr>") == 1 + len(report.findings) == 2
    assert "&lt;lambda&gt;" in text
    assert "<lambda>" not in text
    for part in ("pr.repair_torch()", "silently wrong: jvp(jvp)", "wrong, missing or not known: 1", "WRONG"):
        assert part in text
    assert "<table>" not in pr.audit(torch.sin, (torch.randn(2),))._repr_html_()
    rows = (Row("forward", "ok", 1e-9, 1e-6), Row("vjp", "failed", 1.0, 1e-6, "x_bar[0] < 3"))
    checked = pr.testing.Report("nc::<op>", rows)
    assert checked._repr_html_().count("<td") == 10
    assert "x_bar[0] &lt; 3" in checked._repr_html_()
    assert "nc::&lt;op&gt;" in checked._repr_html_()


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
        assert "repair_torch" in note


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


def test_the_columns_of_the_repair_are_read_where_the_table_has_them(tmp_path, monkeypatch):
    path, x = tmp_path / "torch_2.13.csv", (torch.randn(2),)
    path.write_text("operator,wrong,raises,repaired_wrong,repaired_raises\naten.sin.default,ff,,,rrr\n")
    monkeypatch.setattr(table, "_nearest", lambda: path)
    table._table.cache_clear()
    try:
        assert table.verdict_of("aten.sin.default") == (("ff",), ())
        assert table.verdict_of("aten.sin.default", repaired=True) == ((), ("rrr",))
        assert pr.audit(torch.sin, x).findings[0].remedy == "pr.repair_torch()"
        assert "repair_torch" not in pr.audit(torch.sin, x, order=3).findings[0].remedy
        with pr.repair_torch():
            assert pr.audit(torch.sin, x)
            assert pr.audit(torch.sin, x, order=3).findings[0].raises == ("vjp(vjp(vjp))",)
    finally:
        table._table.cache_clear()


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
        with pr.repair_torch():
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
