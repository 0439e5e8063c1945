"""`repair_torch`: one switch in the dispatcher, under which code for torch has right derivatives."""

import copy
import multiprocessing
import re
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives._audit.nestings import nested, perturbed_sum
from primitives._repair import state
from tests.support import in_another_thread, noting, randn

pytestmark = pytest.mark.usefixtures("seeded")
X = (4, 3)


def layer_norm(x):
    return F.layer_norm(x, (3,), x[0] + 2, x[1], 0.3)


def test_what_was_recorded_inside_is_right_after_the_block_and_in_another_thread():
    x, v = randn(*X).requires_grad_(), randn(*X)
    with pr.repair_torch():
        value = perturbed_sum([layer_norm(x)])
        truth = nested(lambda x: perturbed_sum([layer_norm(x)]), [v], "rrr")(x.detach())

    def third():
        h = value
        for _ in range(3):
            (gradient,) = torch.autograd.grad(h, x, create_graph=True)
            h = (gradient * v).sum()
        return h.detach()

    torch.testing.assert_close([third(), in_another_thread(third)], [truth, truth])


def test_the_switch():
    def look():
        return pr.is_repaired()

    assert not pr.is_repaired()
    first = pr.repair_torch()
    try:
        assert pr.is_repaired()
        with pr.repair_torch(), pytest.raises(ZeroDivisionError), pr.repair_torch():
            raise ZeroDivisionError
        assert pr.is_repaired()
        decorated = pr.repair_torch()(look)
        assert decorated()
        assert pr.is_repaired()
        assert re.fullmatch(r"<repair_torch: \d\d operators of torch are repaired; undo\(\) ends it>", repr(first))
        pr.repair_torch().undo()
        assert not pr.is_repaired()
        assert "as it was" in repr(first)
        assert decorated()
        pr.repair_torch()
        assert decorated()
        assert pr.is_repaired(), "a block of an older object leaves the process alone"
    finally:
        first.undo()
    with pr.repair_torch():
        assert not in_another_thread(pr.is_repaired)
        assert pr.is_repaired()
    assert not pr.is_repaired()
    assert F.layer_norm(randn(*X).requires_grad_(), (3,)).grad_fn.metadata == {}


NET = {
    "norms": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Hardsigmoid()),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


def _graphs(net, x):
    found = []

    torch._dynamo.reset()
    backend = noting(lambda graph: found.append(graph.print_readable(print_output=False)))
    torch.compile(net, backend=backend, fullgraph=True)(x).sum().backward()
    return found


def test_it_takes_no_argument():
    for given in (nn.Linear(2, 2), torch.sin):
        with pytest.raises(TypeError, match=rf"without arguments, got {type(given).__name__}. Write @pr.repair_torch"):
            pr.repair_torch(given)


@pytest.mark.parametrize("name", NET)
def test_a_compiler_sees_the_graph_that_it_saw_before(name):
    net, x = NET[name](), torch.randn(5, 3 if name == "norms" else 4)
    x = x if name == "norms" else x.unsqueeze(0)
    expected = _graphs(net, x)
    with pr.repair_torch():
        assert _graphs(net, x) == expected


def _curvature(x):
    """In forward mode: in builds of torch with CUDA no child has a backward pass whose parent has compiled one."""
    v = torch.ones_like(x)
    return torch.func.jvp(lambda x: torch.func.jvp(torch.sinc, (x,), (v,))[1], (x,), (v,))[1]


def test_code_that_was_compiled_before_is_compiled_again():
    # Torch keeps what fake tensors gave for the whole process; an `alias` of a number that a symbolic trace has left
    # there makes Dynamo refuse nested JVPs of `where` with a number.
    FakeTensorMode.cache_clear()
    x = torch.zeros(3, dtype=torch.float64)
    compiled = torch.compile(_curvature, backend="aot_eager", fullgraph=True)
    assert compiled(x).abs().max() == 0, "torch is wrong"
    right, decorated = torch.full_like(x, -(torch.pi**2) / 3), pr.repair_torch()(lambda x: compiled(x))
    torch.testing.assert_close(decorated(x), right)
    for _ in range(2):
        with pr.repair_torch():
            torch.testing.assert_close(compiled(x), right)
    frames = torch._dynamo.convert_frame.FRAME_COUNTER
    with pr.repair_torch():
        compiled(x)
    assert frames == torch._dynamo.convert_frame.FRAME_COUNTER, "what was compiled inside stays"


def test_inside_a_compiled_function_the_switch_is_refused():
    def inside(x):
        with pr.repair_torch():
            return x + 1

    with pytest.raises(Exception, match="cannot change inside a compiled function"):
        torch.compile(inside, backend="eager", fullgraph=True)(torch.ones(1))
    assert not pr.is_repaired()


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_loss_with_a_jvp_compiles_whole(compiler):
    net, v = NET["norms"]().double(), randn(5, 3)
    net[2].eval()
    x = randn(5, 3)

    def loss(x):
        return torch.func.jvp(net, (x,), (v,))[1].square().sum()

    with pr.repair_torch():
        truth, leaf = torch.func.grad(loss)(x), x.clone().requires_grad_()
        torch.compile(loss, backend=compiler, fullgraph=True)(leaf).backward()
        torch.testing.assert_close(leaf.grad, truth)


def test_export_fx_script_and_copies_are_those_of_torch():
    net, x = NET["norms"]().eval(), torch.randn(5, 3)
    with pr.repair_torch():
        names = [str(node.target) for node in torch.export.export(net, (x,)).graph.nodes]
        assert "aten.layer_norm.default" in names
        for same in (torch.fx.symbolic_trace(net), torch.jit.script(net), torch.jit.trace(net, x), copy.deepcopy(net)):
            torch.testing.assert_close(same(x), net(x), rtol=0, atol=0)
        assert type(net[1]) is nn.LayerNorm


def _second(net, x):
    (gradient,) = torch.autograd.grad(perturbed_sum([net(x)]), x, create_graph=True)
    return torch.autograd.grad((gradient**2).sum(), x)[0]


def test_what_stands_around_a_model():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()).double(), randn(5, 3).requires_grad_()
    truth = _second(lambda x: pr.functional.layer_norm(net[0](x), (3,), net[1].weight, net[1].bias).tanh(), x)
    ways = {
        "checkpoint": lambda x: checkpoint(net, x, use_reentrant=False),
        "functional_call": lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,)),
        "pr checkpoint": lambda x: pr.func.checkpoint(net, x),
    }
    switch = pr.repair_torch()
    try:
        for name, way in ways.items():
            torch.testing.assert_close(_second(way, x), truth, msg=name)
        with torch.autograd.graph.save_on_cpu():
            torch.testing.assert_close(_second(net, x), truth)
    finally:
        switch.undo()


def test_checkpoint_keeps_nothing_more():
    """Nodes are marked, and do not hold on to what a checkpoint throws away."""
    norm, x, packed = nn.LayerNorm(64), torch.randn(8, 64, requires_grad=True), []

    def pack(t):
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        norm(x)
        expected = list(packed)
        packed.clear()
        with pr.repair_torch():
            norm(x)
    assert packed == expected


def test_an_operator_without_a_backward_operator_lets_go_of_its_arguments():
    leaf = torch.randn(4, requires_grad=True)
    with pr.repair_torch(), torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda x: x):
        x = leaf * 1
        reference, y = weakref.ref(x), torch.sinc(x)
        del x
    assert (reference(), y.requires_grad) == (None, True)


def test_expanded_weights_give_the_gradients_of_each_sample():
    """Torch's own tensor class for them takes its place in calls of norms."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    net, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)).double(), randn(5, 3)
    with pr.repair_torch():
        loss = call_for_per_sample_grads(net, loss_reduction="sum")(x).square().sum()
        loss.backward()
        rows = [torch.autograd.grad(net(row[None]).square().sum(), list(net.parameters())) for row in x]
    for parameter, *gradients in zip(net.parameters(), *rows, strict=True):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(gradients))


def test_methods_of_a_subclass_take_no_part_in_formulas():
    class Labeled(torch.Tensor):
        def to(self, *args, **kwargs):
            assert self.label  # which results of operators have not
            return super().to(*args, **kwargs)

        def square(self):
            assert self.label
            return super().square()

    def by_forward_ad(f, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.abs()))).tangent

    def second(f, x):
        return torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,))[1]

    x, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    with pr.repair_torch():
        assert type(F.layer_norm(x.as_subclass(Labeled), (3,))) is Labeled
        found, expected = (
            _second(lambda x: F.layer_norm(x, (3,)).sin(), x.requires_grad_())
            for x in (x.as_subclass(Labeled), x.clone())
        )
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
        for f in (lambda x: F.layer_norm(x, (3,)), torch.sinc, lambda x: x.pow(torch.arange(3))):
            for derivative in (by_forward_ad, second):
                found = derivative(f, x.detach().as_subclass(Labeled)).as_subclass(torch.Tensor)
                torch.testing.assert_close(found, derivative(f, x.detach()))
    labeled = x.as_subclass(Labeled)
    labeled.label = "u"
    loss = pr.functional.cross_entropy(labeled, labels)
    torch.testing.assert_close(loss.as_subclass(torch.Tensor), F.cross_entropy(x, labels))


def test_a_forked_worker_is_repaired_too():
    switch, context, x = pr.repair_torch(), multiprocessing.get_context("fork"), torch.zeros(2)
    try:
        queue = context.Queue()
        child = context.Process(target=lambda: queue.put(_curvature(x).tolist()))
        child.start()
        assert queue.get(timeout=60) == _curvature(x).tolist() != [0.0, 0.0]
        child.join()
    finally:
        switch.undo()


def test_a_block_ends_for_the_thread_that_entered_it():
    def steps():
        with pr.repair_torch():
            yield

    (generator := steps()).send(None)
    assert in_another_thread(lambda: (generator.close(), state.this_thread.num_contexts)[1]) == 0
    assert not pr.is_repaired()


def test_another_package_that_registered_for_an_operator_is_named(tmp_path):
    path = tmp_path / "flag_gems_like.py"
    path.write_text(
        "import torch\n"
        "library = torch.library.Library('aten', 'IMPL')\n"
        "own = torch.library.get_kernel('aten::glu', 'AutogradCPU')\n"
        "kernel = lambda keys, x, dim=-1: own.call_boxed(keys, x, dim)\n"
        "library.impl('glu', kernel, 'AutogradCPU', with_keyset=True, allow_override=True)\n"
    )
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        exec(compile(path.read_text(), str(path), "exec"), scope)
    try:
        with pytest.warns(RuntimeWarning, match="flag_gems_like.py"), pr.repair_torch() as switch:
            assert F.glu(torch.ones(2)).shape == (1,)
    finally:
        switch.undo()
        scope["library"]._destroy()
