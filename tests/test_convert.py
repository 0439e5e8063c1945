"""convert and revert: which modules change, and that nothing else about a model does."""

import abc
import copy
import typing

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import primitives as pr


class OwnLayerNorm(nn.LayerNorm):
    """As torch's, by another name."""


class OwnLazy(nn.LazyBatchNorm2d):
    pass


class OwnAttention(nn.MultiheadAttention):
    """As opacus has one."""

    def forward(self, query, key, value):
        return super().forward(query, key, value, need_weights=False)[0]


class LlamaRMSNorm(nn.Module):
    """Of the user, by the text of a library."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(4), "b": OwnLayerNorm(4), "group": nn.GroupNorm(1, 2)})
        self.drop = nn.Dropout(0.0)
        self.head = nn.LogSoftmax(dim=-1)

    def forward(self, x):
        x = self.norms["group"](self.conv(x))
        return self.head(self.drop(self.norms["b"](self.norms["a"](x))))


CHANGED = ["conv.1", "norms.a", "norms.group", "head"]


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
        assert (type(module) is before[name]) == (name not in CHANGED)
        if not list(module.children()):
            assert repr(module).startswith("primitives.") == (name in CHANGED)
    header, *rows = repr(pr.nn.converted(net)).splitlines()
    assert header.split() == ["module", "class", "computed", "by"]
    assert rows[1].split() == ["norms.a", "torch.nn.modules.normalization.LayerNorm", "primitives.nn.LayerNorm"]
    after = types(net)
    assert types(pr.nn.convert(net)) == after
    assert pr.nn.revert(net) is net
    assert types(net) == before
    assert pr.nn.converted(net) == {}
    assert repr(pr.nn.converted(net)) == "no module is this package's"


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
    pr.nn.revert(net)
    assert all(new is old for new, (_, old) in zip([*net.parameters(), *net.buffers()], tensors, strict=True))
    twin.load_state_dict(net.state_dict())
    assert torch.equal(net(x), twin(x))


class Abstract(abc.ABC, nn.Sequential):
    pass


class Typed(typing.Generic[typing.TypeVar("T")], nn.Sequential):
    pass


class Sized(typing.Protocol):
    size: int


class WithProtocol(Sized, nn.Sequential):
    pass


LEFT = {
    "subclass": lambda: OwnLayerNorm(4),
    "lazy subclass": OwnLazy,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).self_attn,
    "own attention": lambda: OwnAttention(4, 2),
    "own norm": lambda: LlamaRMSNorm(4),
    "replaced forward": lambda: replaced(nn.LayerNorm(4)),
    "script": lambda: torch.jit.script(nn.LayerNorm(4)),
    "dropout": lambda: nn.Dropout(0.5),
}


def replaced(module):
    """As accelerate hooks a module."""
    forward = module.forward
    module.forward = lambda x: forward(x) + 1
    return module


@pytest.mark.filterwarnings("error", "ignore::DeprecationWarning")  # torch.jit's own
@pytest.mark.parametrize("outer", [nn.Sequential, Abstract, Typed, WithProtocol], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("case", LEFT)
def test_classes_of_users_stay_as_they_are(case, outer):
    """Without a word, in models of whatever metaclass."""
    model = outer(LEFT[case](), nn.LayerNorm(4))
    before, attributes = types(model), set(vars(model[0]))
    assert list(pr.nn.converted(pr.nn.convert(model))) == ["1"]
    assert types(model) == {**before, "1": pr.nn.LayerNorm}
    assert set(vars(model[0])) == attributes
    assert types(pr.nn.revert(model)) == before


def test_all_or_nothing():
    """The class of a parametrized module is somebody else's, and may refuse to be made again."""
    model = nn.Sequential(nn.LayerNorm(4), LlamaRMSNorm(4), nn.Sequential(nn.LayerNorm(4)), nn.GroupNorm(1, 4))
    parametrize.register_parametrization(model[2][0], "weight", Doubled())

    class Refuses:
        def __set_name__(self, owner, name):
            raise ValueError("not twice")

    type(model[2][0]).extra = Refuses()
    before, state = types(model), [dict(vars(module)) for module in model.modules()]
    pr.nn.register_converter(LlamaRMSNorm, by_rms_norm)
    try:
        with pytest.raises(TypeError, match=r"(?s)^convert: 2\.0, of class torch.*LayerNorm.*Refuses.*as it was"):
            pr.nn.convert(model)
    finally:
        pr.nn.register_converter(LlamaRMSNorm, None)
    assert types(model) == before
    assert [dict(vars(module)) for module in model.modules()] == state


def by_rms_norm(module, x):
    return pr.functional.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon, cast_first=True)


CLASSES = {
    "default": (None, ["0", "1"]),
    "dropout": ([nn.Dropout], ["2"]),
    "alone": (nn.Dropout, ["2"]),
    "ours": ([pr.nn.LayerNorm], ["0"]),
    "base": ([nn.modules.batchnorm._BatchNorm], ["1"]),
    "all": ([nn.Module], ["0", "1", "2"]),
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
    for wrong, named in (([nn.LayerNorm, nn.Linear], "Linear"), (["x"], "'x'"), (OwnLayerNorm, "OwnLayerNorm")):
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


@pytest.mark.parametrize("first", ["parametrized", "converted"])
def test_parametrized_modules(first):
    model, x = nn.LayerNorm(4).double(), torch.randn(3, 4, dtype=torch.float64)
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
    assert parametrize.type_before_parametrizations(model) is nn.LayerNorm
    assert_close(model(x), twin(x))
    parametrize.remove_parametrizations(pr.nn.convert(model), "weight")
    assert type(model) is pr.nn.LayerNorm
    assert type(pr.nn.revert(model)) is nn.LayerNorm


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


def test_a_converted_model_compiles_and_exports(net, x):
    net = pr.nn.convert(net.eval())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_close(*[torch.autograd.grad(f(x).sin().sum(), list(net.parameters())) for f in (compiled, net)])
    exported = torch.export.export(net, (x,))
    assert_close(exported.module()(x), net(x))
    assert "primitives.layer_norm" in exported.graph_module.code
