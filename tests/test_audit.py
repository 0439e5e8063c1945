"""`audit`: what it finds in models and functions, and that the table of torch's derivatives says what torch does."""

import functools
import linecache
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db

import primitives as pr
from perf import operator_calls, torch_derivatives
from primitives.__main__ import main as command
from primitives._audit import table
from primitives._core.decomposition import decomposition_table
from primitives.testing import Row
from tests.custom_ops import NAMESPACE, Affine

# Of operators without a batching rule.
slow_batches = pytest.mark.filterwarnings("ignore:There is a performance drop")


def found(report):
    return {finding.operation: finding for finding in report.findings}


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_a_norm_of_torch_is_found_with_its_place_and_its_remedy_makes_it_right():
    net, x = model(), torch.randn(3, 4)
    report = pr.audit(net, (x,))
    norm = found(report)["aten.native_layer_norm.default"]
    assert (set(norm.wrong), norm.raises) == ({"jvp(jvp)", "vjp(jvp)", "jacfwd(jacrev)", "jacrev(jacrev)"}, ())
    (place,) = norm.places
    assert place.startswith("1 (LayerNorm), ")
    assert "test_audit.py" in place
    assert type(norm) is pr.Finding
    assert not report
    for text in (norm.remedy, place, "silently wrong: jvp(jvp), vjp(jvp), jacfwd(jacrev), jacrev(jacrev)"):
        assert text in str(report)
    assert pr.audit(net, (x,), order=1).ok
    assert norm.remedy == "pr.repair_torch()"
    with pr.repair_torch():
        repaired = pr.audit(net, (x,), order=3, strict=True)
    assert repaired.ok
    assert "with pr.repair_torch()" in str(repaired)
    assert not pr.audit(net, (x,)).ok, "the repair has ended"


def test_trees_of_nodes_and_arguments_by_keyword_are_taken():
    params = Affine(torch.ones(3), torch.randn(2, 3))

    def norm(params, *, order):
        return Affine(F.layer_norm(params.bias, (3,), params.weight)), order

    report = pr.audit(norm, (params,), {"order": 3}, strict=True, namespace=NAMESPACE)
    assert [*found(report)] == ["aten.native_layer_norm.default"]
    assert "rf" in report.failed
    with pytest.raises(TypeError, match=r"args must be a tuple of arguments, got Affine. Write \(x,\)"):
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


def test_a_package_beside_torch_is_not_torch():
    scope = {}
    exec(compile("def run(f, x):\n    return f(x, (3,))", f"{torch.__path__[0]}vision/ops.py", "exec"), scope)
    (finding,) = pr.audit(functools.partial(scope["run"], F.layer_norm), (torch.randn(2, 3),)).findings
    (place,) = finding.places
    assert place.endswith("/torchvision/ops.py:2 in run")


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
    with pytest.raises(RuntimeError, match="captured") as caught:
        pr.func.jacrev(nn.BatchNorm1d(2))(torch.randn(3, 2))
    assert "pure_module" in caught.value.__notes__[0]


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
    torch.manual_seed(0)
    return operator_calls.recorded(database=())


def test_the_columns_of_the_repair_are_read_where_the_table_has_them(tmp_path, monkeypatch):
    path, x = tmp_path / "torch_2.13.csv", (torch.randn(2),)
    path.write_text("operator,wrong,raises,repaired_wrong,repaired_raises\naten.sin.default,ff,,,rrr\n")
    monkeypatch.setattr(table, "_nearest", lambda: path)
    table.forget_table()
    try:
        assert table.verdict_of("aten.sin.default") == (("ff",), ())
        assert table.verdict_of("aten.sin.default", repaired=True) == ((), ("rrr",))
        assert pr.audit(torch.sin, x).findings[0].remedy == "pr.repair_torch()"
        assert "repair_torch" not in pr.audit(torch.sin, x, order=3).findings[0].remedy
        with pr.repair_torch():
            assert pr.audit(torch.sin, x)
            assert pr.audit(torch.sin, x, order=3).findings[0].raises == ("vjp(vjp(vjp))",)
    finally:
        monkeypatch.undo()
        table.forget_table()
        # Kernels that were registered by this table.
        pr.repair_torch().undo()


def test_backward_operators_follow_the_forward_ones_one_order_lower():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 2), nn.Softplus())
    x = torch.randn(3, 1, 3, 3)

    def penalty(x):
        (gradient,) = torch.autograd.grad(net(x).abs().square().sum(), x, create_graph=True)
        # Of `abs`, torch adds a tensor that it knows to be zero.
        return torch.autograd.grad(gradient.square().sum(), x, create_graph=True)[0].sum()

    assert set(found(pr.audit(penalty, (x,), order=1))) == set()
    # The table goes to order 3 of the forward operators, and no further.
    assert "aten.tanh_backward.default" in found(pr.audit(penalty, (x,), order=3))
    for name in ("_cdist_backward", "huber_loss_backward"):
        assert "f" in table.verdict_of(f"aten.{name}.default", 1).raises, name
        assert table.verdict_of(f"aten.{name}.default", 1, repaired=True) == ((), ()), name
    assert "ff" in table.verdict_of("aten.native_layer_norm_backward.default", 2).wrong


# By day the judge is tested: the table changes with torch alone.
@pytest.mark.nightly
@slow_batches
def test_the_table_says_what_torch_does(calls):
    assert len(calls) > 20
    for name, of_name in calls.items():
        verdicts = torch_derivatives.verdicts_of(of_name)
        wrong, raises = (tuple(n for n, v in (verdicts or {}).items() if v == kind) for kind in ("wrong", "raises"))
        if torch.__version__.startswith(table.tabled_version()) and verdicts:
            assert table.verdict_of(name) == (wrong, raises), name


def test_the_command_audits_what_a_function_returns(tmp_path, monkeypatch, capsys):
    (tmp_path / "net_of_mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.LayerNorm(3), (torch.randn(2, 3),)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command(["audit", "net_of_mine:make"]) == 1
    assert "remedy: pr.repair_torch()" in capsys.readouterr().out
    assert command(["audit", "net_of_mine:make", "--order", "1"]) == 0


@slow_batches
def test_the_judge_knows_what_is_right_alone_and_wrong_under_vmap():
    norms = operator_calls.recorded([op for op in op_db if op.name == "native_layer_norm"])
    of_name = norms["aten.native_layer_norm.default"]
    wrong = {nesting for nesting, verdict in torch_derivatives.verdicts_of(of_name, 1).items() if verdict == "wrong"}
    # torch.func.hessian, and jacrev(jacrev).
    assert {"FR", "RR"} <= wrong
    assert not {"fr", "rr", "FF"} & wrong
    with pr.repair_torch():
        assert set(torch_derivatives.verdicts_of(of_name, 1).values()) == {"right"}


PLANTED = {
    "another value": (lambda y: y + 1e-3, {"f", "r"}),
    "another derivative": (lambda y: 2 * y - y.detach(), {"f", "r", "ff", "rr", "rrr"}),
}


@slow_batches
@pytest.mark.parametrize("fault", PLANTED)
def test_the_judge_sees_a_fault_of_a_formula(calls, monkeypatch, fault):
    plant, least = PLANTED[fault]
    formula = decomposition_table[torch.ops.aten.sinc.default]
    monkeypatch.setitem(decomposition_table, torch.ops.aten.sinc.default, lambda x: plant(formula(x)))
    pr.repair_torch().undo()
    try:
        with pr.repair_torch():
            verdicts = torch_derivatives.verdicts_of(calls["aten.sinc.default zeros"])
    finally:
        # Kernels are made anew, of the formula that is right.
        pr.repair_torch().undo()
    assert {nesting for nesting, verdict in verdicts.items() if verdict == "wrong"} >= least
