"""convert and revert: which modules change, what they say of the others, and that nothing else about a model does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import primitives as pr
from tests.support import normal
from tests.test_convert_norms import SIZE, CastFirst


class OwnLayerNorm(nn.LayerNorm):
    """As torch's, by another name."""


class OwnBatchNorm(nn.BatchNorm2d):
    """Takes one shape alone."""

    def _check_input_dim(self, input):
        if input.dim() != 4:
            raise ValueError("own check")


class OwnLazy(nn.LazyBatchNorm2d):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), OwnBatchNorm(2))
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(4), "b": OwnLayerNorm(4), "group": nn.GroupNorm(1, 2)})
        self.drop = nn.Dropout(0.0)
        self.head = nn.LogSoftmax(dim=-1)

    def forward(self, x):
        x = self.norms["group"](self.conv(x))
        return self.head(self.drop(self.norms["b"](self.norms["a"](x))))


CHANGED = ["conv.1", "conv.2", "norms.a", "norms.b", "norms.group", "head"]
# Run as it is written, with another behavior around it.
SERVED = [""]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x():
    return torch.randn(6, 1, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def types(model):
    return {name: type(module) for name, module in model.named_modules()}


def node(y):
    """The name of the operation that made `y`."""
    return y.grad_fn.name()


def test_convert_changes_what_it_knows_and_shows_it(net):
    before = types(net)
    assert pr.nn.convert(net) is net
    assert list(pr.nn.converted(net)) == CHANGED
    for name, module in net.named_modules():
        assert isinstance(module, before[name])
        assert (type(module) is before[name]) == (name not in CHANGED + SERVED)
        if not list(module.children()):
            assert repr(module).startswith("primitives.") == (name in CHANGED)
    after = types(net)
    assert types(pr.nn.convert(net)) == after
    assert pr.nn.revert(net) is net
    assert types(net) == before
    assert pr.nn.converted(net) == {}


def test_results_gradients_and_state_stay_the_same(net, x):
    twin = copy.deepcopy(net)
    net.norms["a"].weight.requires_grad_(False)
    net.conv[1].eval(), twin.conv[1].eval()
    tensors, keys = [*net.named_parameters(), *net.named_buffers()], list(net.state_dict())
    pr.nn.convert(net)
    for (name, new), (old_name, old) in zip([*net.named_parameters(), *net.named_buffers()], tensors, strict=True):
        assert (name, new) == (old_name, old)
        assert new is old
    assert list(net.state_dict()) == keys
    assert not net.conv[1].training
    for _ in range(2):
        for model in (net, twin):
            model(x).square().sum().backward()
    assert net.norms["a"].weight.grad is None
    twin.norms["a"].weight.grad = None
    assert_close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    assert_close(net.state_dict(), twin.state_dict())


def test_a_subclass_computes_with_this_package_and_keeps_its_own_methods(net):
    pr.nn.convert(net)
    normal = torch.randn(3, 4, dtype=torch.float64)
    assert node(net.norms["b"](normal)) == node(pr.nn.LayerNorm(4).double()(normal))
    with pytest.raises(ValueError, match="own check"):
        net.conv[2](normal)


LEFT = {
    "lazy": (OwnLazy, OwnLazy, "lazy", "first call"),
    "script": (lambda: torch.jit.script(nn.LayerNorm(4)), torch.jit.ScriptModule, "TorchScript", "torch.jit.script"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.parametrize("make, cls, reason, remedy", LEFT.values(), ids=LEFT)
def test_what_is_left_is_named_with_reason_and_remedy(make, cls, reason, remedy):
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Sequential(make()))
    before = types(model)
    with pytest.warns(pr.nn.ConversionWarning, match=rf"(?s)2 modules.*1 and 1 more .*{reason}.*{remedy}") as caught:
        pr.nn.convert(model)
    assert caught[0].filename == __file__
    assert [left.path for left in caught[0].message.left] == ["1", "2.0"]
    for left in caught[0].message.left:
        assert issubclass(left.type, cls)
        assert reason in left.reason
        assert remedy in left.remedy
    assert types(model) == before


CLASSES = {
    "default": (None, ["0", "1"]),
    "dropout": ([nn.Dropout], ["2"]),
    "alone": (nn.Dropout, ["2"]),
    "ours": ([pr.nn.LayerNorm], ["0"]),
    "base": ([nn.modules.batchnorm._BatchNorm], ["1"]),
    "all": ([nn.Module], ["0", "1", "2"]),
    "subclass": ([OwnLayerNorm], []),
    "others": ([Net], []),
}


@pytest.mark.parametrize("classes, expected", CLASSES.values(), ids=CLASSES)
def test_a_choice_of_classes(classes, expected):
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    assert list(pr.nn.converted(pr.nn.convert(model, classes=classes))) == expected


def test_shared_modules_and_roots_are_converted_and_nothing_else_is_taken():
    norm = nn.LayerNorm(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    assert list(pr.nn.converted(pr.nn.convert(model))) == ["0"]
    assert pr.nn.converted(norm) == {"": norm}
    for change in (pr.nn.convert, pr.nn.revert, pr.nn.converted):
        for wrong in (None, nn.LayerNorm, [nn.LayerNorm(3)]):
            with pytest.raises(TypeError, match=f"{change.__name__}: .*torch.nn.Module, got {type(wrong).__name__}"):
                change(wrong)
    for wrong, named in (([nn.LayerNorm, nn.Linear], "Linear"), (["x"], "'x'")):
        with pytest.raises(TypeError, match=named):
            pr.nn.convert(norm, classes=wrong)


def test_hooks_are_kept_and_run():
    norm, calls, x = nn.LayerNorm(4).double(), [], torch.randn(6, 4, dtype=torch.float64)
    norm.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    norm.register_forward_hook(lambda module, args, kwargs, y: y + 1, with_kwargs=True)
    norm.register_full_backward_hook(lambda module, x_bar, y_bar: (x_bar[0] * 3,))
    norm.register_state_dict_pre_hook(lambda module, prefix, keep_vars: calls.append("state"))
    norm.register_load_state_dict_pre_hook(lambda *args: calls.append("before"))
    norm.register_load_state_dict_post_hook(lambda module, keys: calls.append("after"))
    results = []
    for change in (lambda module: None, pr.nn.convert, pr.nn.revert):
        change(norm)
        norm.load_state_dict(norm.state_dict())
        value = x.clone().requires_grad_()
        y = norm(value)
        results.append((y, *torch.autograd.grad(y.sin().sum(), value)))
    assert calls == ["state", "before", "after"] * 3
    assert_close(results[1:], results[:1] * 2)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("make", [nn.LayerNorm, OwnLayerNorm])
@pytest.mark.parametrize("first", ["parametrized", "converted"])
def test_parametrized_modules(make, first):
    model, x = make(4).double(), torch.randn(3, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    if first == "converted":
        pr.nn.convert(model)
    for module in (model, twin):
        parametrize.register_parametrization(module, "weight", Doubled())
    bystander, keys = copy.deepcopy(model), list(model.state_dict())
    pr.nn.convert(model)
    assert pr.nn.converted(model)
    assert bool(pr.nn.converted(bystander)) == (first == "converted")
    assert parametrize.is_parametrized(model)
    assert list(model.state_dict()) == keys
    assert_close(model(x), twin(x))
    pr.nn.revert(model)
    assert parametrize.type_before_parametrizations(model) is make
    assert_close(model(x), twin(x))
    parametrize.remove_parametrizations(pr.nn.convert(model), "weight")
    assert issubclass(type(model), (make, pr.nn.LayerNorm))
    assert_close(model(x), twin(x))
    assert type(pr.nn.revert(model)) is make


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_lazy_batch_norm_is_ours_from_its_first_call_on(axes):
    ours, theirs = [getattr(nn, f"LazyBatchNorm{axes}d")() for _ in range(2)]
    x = torch.randn(2, 3, *[2] * axes, requires_grad=True)
    assert "primitives.Lazy" in repr(pr.nn.convert(ours))
    y = ours(x)
    assert_close(y, theirs(x))
    assert type(ours) is getattr(pr.nn, f"BatchNorm{axes}d")
    assert node(y) == node(ours(x))
    assert_close(ours.state_dict()["num_batches_tracked"], torch.tensor(2))
    assert type(pr.nn.revert(ours)) is type(theirs)


def test_convert_sync_batchnorm_does_not_undo_it_silently(net):
    replaced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
    assert isinstance(replaced.conv[1], nn.SyncBatchNorm)
    with pytest.warns(pr.nn.ConversionWarning, match=r"primitives\.\w*BatchNorm\w* by torch") as caught:
        nn.SyncBatchNorm.convert_sync_batchnorm(pr.nn.convert(net))
    assert {warning.filename for warning in caught} == {__file__}


# Other tools of torch.


def test_symbolic_trace_takes_the_modules_for_leaves(net, x):
    net.norms["a"].register_forward_hook(lambda module, args, y: y + 1)
    graph = torch.fx.symbolic_trace(pr.nn.convert(net.eval()))
    leaves = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert set(CHANGED) < set(leaves)
    assert_close(graph(x), net(x))


def calls(x):
    y = pr.functional.batch_norm(x, None, None, training=True)
    y = pr.functional.layer_norm(pr.functional.log_softmax(y, 1), (4,))
    return pr.functional.scaled_dot_product_attention(y, y, y)


def test_symbolic_trace_takes_calls_of_functions_for_nodes():
    graph, x = torch.fx.symbolic_trace(calls), torch.randn(3, 4)
    names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    assert names == ["batch_norm", "log_softmax", "layer_norm", "scaled_dot_product_attention"]
    assert_close(graph(x), calls(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 1, 3, 4).double())])
def test_torchscript(net, x, make):
    twin = copy.deepcopy(net).eval()
    scripted = make(pr.nn.convert(net.eval()))
    assert_close(scripted(x), twin(x))
    assert_close(torch.autograd.grad(scripted(x).sin().sum(), net.norms["a"].weight)[0],
                 torch.autograd.grad(twin(x).sin().sum(), twin.norms["a"].weight)[0])  # fmt: skip


def test_calls_of_other_kinds_run_as_they_are_written():
    model = pr.nn.convert(CastFirst())
    x = normal((3, SIZE), 1).float()
    assert_close(model(hidden_states=x), model(x))
    with pytest.raises(TypeError):
        model(x, x)
    with pytest.raises(TypeError):
        model(other=x)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(x[:, :4])
    # Sizes of one axis broadcast, as the class is written.
    assert_close(model(x[:, :1]), CastFirst.forward(model, x[:, :1]))
    assert_close(model(x[0]), CastFirst.forward(model, x[0]))
    model.variance_epsilon = 0.5
    assert_close(model(x), CastFirst.forward(model, x))
    model.weight = nn.Parameter(torch.ones(()))
    assert_close(model(x), CastFirst.forward(model, x))
