"""convert and revert: which modules change type, and that nothing else about a model does."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close

import primitives as pr


class OwnLayerNorm(torch.nn.LayerNorm):
    pass


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.own = OwnLayerNorm(4)
        self.bn = torch.nn.BatchNorm1d(4)
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(self.bn(self.own(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.conv = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
        self.volume = torch.nn.ModuleDict({"a": torch.nn.BatchNorm3d(2), "group": torch.nn.GroupNorm(1, 2)})
        self.head = torch.nn.LogSoftmax(dim=-1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


CHANGED = [
    "blocks.0.norm", "blocks.0.bn", "blocks.1.norm", "blocks.1.bn", "conv.1", "volume.a", "head",
]  # fmt: skip


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def types(model):
    return {name: type(module) for name, module in model.named_modules()}


def is_ours(module):
    return type(module).__module__.startswith("primitives.")


def test_convert_changes_what_it_knows_and_says_so(net):
    before = types(net)
    changed = pr.nn.convert(net)
    assert list(changed) == CHANGED
    for name, module in net.named_modules():
        if name in CHANGED:
            assert changed[name] is module
            assert type(module) is getattr(pr.nn, before[name].__name__)
        else:
            assert type(module) is before[name]


def test_results_gradients_and_state_stay_the_same(net, x):
    twin = copy.deepcopy(net)
    pr.nn.convert(net)
    for _ in range(2):
        for model in (net, twin):
            model(x).square().sum().backward()
    assert_close(net(x), twin(x))
    for mine, their in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, their.grad)
    for (name, mine), (other, their) in zip(net.named_buffers(), twin.named_buffers(), strict=True):
        assert name == other
        assert_close(mine, their)


def test_tensors_keep_their_identity_and_names(net):
    tensors = [*net.named_parameters(), *net.named_buffers()]
    keys, modules = list(net.state_dict()), dict(net.named_modules())
    for change in (pr.nn.convert, pr.nn.revert):
        change(net)
        after = [*net.named_parameters(), *net.named_buffers()]
        assert [name for name, _ in after] == [name for name, _ in tensors]
        assert all(new is old for (_, new), (_, old) in zip(after, tensors, strict=True))
        assert list(net.state_dict()) == keys
        assert all(module is modules[name] for name, module in net.named_modules())


def test_convert_twice_and_revert(net):
    before = types(net)
    converted = pr.nn.convert(net)
    after = types(net)
    assert pr.nn.convert(net) == {}
    assert types(net) == after
    reverted = pr.nn.revert(net)
    assert reverted == converted
    assert types(net) == before
    assert pr.nn.revert(net) == {}


def test_revert_also_reverts_modules_built_here():
    model = torch.nn.Sequential(pr.nn.LayerNorm(3), pr.nn.BatchNorm3d(2))
    assert list(pr.nn.revert(model)) == ["0", "1"]
    assert [type(module) for module in model] == [torch.nn.LayerNorm, torch.nn.BatchNorm3d]


@pytest.mark.parametrize("module", [torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3), torch.nn.LogSoftmax(1)], ids=str)
def test_the_model_may_itself_be_such_a_module(module):
    assert pr.nn.convert(module) == {"": module}
    assert is_ours(module)
    assert pr.nn.revert(module) == {"": module}
    assert type(module).__module__.startswith("torch.nn.")


def test_a_shared_module_stays_shared():
    norm = torch.nn.LayerNorm(4)
    model = torch.nn.Sequential(norm, torch.nn.Linear(4, 4), norm)
    assert pr.nn.convert(model) == {"0": norm}
    assert model[0] is model[2] is norm
    assert is_ours(norm)


def test_subclasses_and_unknown_modules_stay_untouched():
    modules = [
        OwnLayerNorm(3), torch.nn.GroupNorm(1, 3), torch.nn.InstanceNorm2d(3), torch.nn.SyncBatchNorm(3),
        torch.nn.LazyBatchNorm2d(), torch.nn.Softmax(1), torch.nn.Linear(3, 3),
    ]  # fmt: skip
    model = torch.nn.Sequential(*modules)
    attributes = [dict(vars(module)) for module in modules]
    assert pr.nn.convert(model) == {}
    assert [type(module) for module in model] == [type(module) for module in modules]
    assert [vars(module) for module in modules] == attributes


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_kept(net, training):
    net.train(training)
    net.blocks[0].norm.train(not training)
    modes = [module.training for module in net.modules()]
    pr.nn.convert(net)
    assert [module.training for module in net.modules()] == modes


def test_frozen_parameters_stay_frozen(net, x):
    net.blocks[0].norm.weight.requires_grad_(False)
    pr.nn.convert(net)
    net(x).sum().backward()
    assert net.blocks[0].norm.weight.grad is None
    assert net.blocks[0].norm.bias.grad is not None


def test_hooks_are_kept_and_run(x):
    norm, calls = torch.nn.LayerNorm(4).double(), []
    norm.register_forward_pre_hook(lambda module, args: calls.append("pre") or (args[0] * 2,))
    norm.register_forward_hook(lambda module, args, output: calls.append("forward") or output + 1)
    norm.register_full_backward_pre_hook(lambda module, cotangents: calls.append("backward pre"))
    norm.register_full_backward_hook(lambda module, x_bar, y_bar: calls.append("backward") or (x_bar[0] * 3,))
    norm.register_state_dict_pre_hook(lambda module, prefix, keep_vars: calls.append("state_dict"))
    results = []
    for change in (lambda module: None, pr.nn.convert, pr.nn.revert):
        change(norm)
        value = x.clone().requires_grad_()
        y = norm(value)
        y.sin().sum().backward()
        norm.state_dict()
        results.append((y.detach(), value.grad, tuple(calls)))
        calls.clear()
    assert results[0][2] == ("pre", "forward", "backward pre", "backward", "state_dict")
    for result in results[1:]:
        assert_close(result[:2], results[0][:2])
        assert result[2] == results[0][2]


def test_the_optimizer_goes_on_with_the_same_parameters(net, x):
    twin = copy.deepcopy(net)
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        for step in range(4):
            if model is net and step % 2:
                pr.nn.convert(net)
            elif model is net:
                pr.nn.revert(net)
            optimizer.zero_grad()
            model(x)[:, 0].sum().neg().backward()
            optimizer.step()
    for mine, their in zip(net.parameters(), twin.parameters(), strict=True):
        assert_close(mine, their)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrized_module_keeps_its_parametrization(x):
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)).double()
    parametrize.register_parametrization(model[0], "weight", Doubled())
    expected = model(x)
    keys = list(model.state_dict())
    # A parametrized module is a class of its own, which is not known here.
    assert list(pr.nn.convert(model)) == ["1"]
    assert parametrize.is_parametrized(model[0])
    assert_close(model(x), expected)
    assert list(model.state_dict()) == keys


def test_a_converted_module_can_be_parametrized(x):
    model, twin = torch.nn.LayerNorm(4).double(), torch.nn.LayerNorm(4).double()
    pr.nn.convert(model)
    for module in (model, twin):
        parametrize.register_parametrization(module, "weight", Doubled())
    assert_close(model(x), twin(x))
    assert pr.nn.revert(model) == {}
    parametrize.remove_parametrizations(model, "weight")
    assert type(model) is pr.nn.LayerNorm
    assert pr.nn.revert(model) == {"": model}


def test_a_pruned_module_keeps_its_mask(x):
    torch.manual_seed(0)
    model = torch.nn.LayerNorm(4).double()
    prune.random_unstructured(model, "weight", amount=2)
    expected = model(x)
    pr.nn.convert(model)
    assert_close(model(x), expected)
    assert list(model.state_dict()) == ["bias", "weight_orig", "weight_mask"]
    model(x).square().sum().backward()
    assert torch.equal(model.weight_orig.grad == 0, model.weight_mask == 0)
    prune.remove(model, "weight")
    assert_close(model(x), expected)


def test_convert_keeps_no_module_alive(net):
    pr.nn.convert(net)
    reference = weakref.ref(net.head)
    del net.head
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("change", [pr.nn.convert, pr.nn.revert])
@pytest.mark.parametrize(
    "model", [None, 3, torch.nn.LayerNorm, [torch.nn.LayerNorm(3)], {"a": torch.nn.LayerNorm(3)}], ids=str
)
def test_what_is_no_module_raises_and_stays(change, model):
    with pytest.raises(TypeError) as caught:
        change(model)
    assert str(caught.value) == f"{change.__name__}: model must be a torch.nn.Module, got {type(model).__name__}."
    if isinstance(model, list):
        assert type(model[0]) is torch.nn.LayerNorm
