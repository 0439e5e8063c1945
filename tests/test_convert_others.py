"""convert on modules that others wrote: they stay as they are, and the functions of torch that they call are served."""

import contextlib
import copy
import functools
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import primitives as pr
from tests.support import along


class OwnLayerNorm(nn.LayerNorm):
    """As torch's, by another name."""


def wrapped(module):
    """As accelerate hooks a module."""
    module.forward = functools.partial(module.forward)
    return module


class Attention(nn.Module):
    """Calls a function of torch, as attention does in most libraries."""

    subclasses = 0

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def __init_subclass__(cls, **kwargs):
        Attention.subclasses += 1

    def __reduce__(self):
        return (made, (self.qkv,))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def made(qkv):
    attention = Attention()
    attention.qkv = qkv
    return attention


class Checkpointed(nn.Module):
    """Runs its part again in the backward, after every context of the caller has ended."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


OTHERS = {
    "function": Attention,
    "replaced forward": lambda: wrapped(nn.LayerNorm(4)),
    "own class, replaced forward": lambda: wrapped(OwnLayerNorm(4)),
    "parts": lambda: nn.Sequential(nn.Linear(4, 4), Attention(), Attention()),
}


def curvature(model, x):
    return along(along(lambda x: model(x).pow(3).sum()))(x)


@pytest.mark.parametrize("case", OTHERS)
def test_what_others_wrote_runs_as_it_is_and_is_served(case):
    """Without a warning, since nothing is left to be wrong."""
    torch.manual_seed(0)
    model, x = OTHERS[case]().double(), torch.randn(2, 3, 4, dtype=torch.float64)
    with pr.override_torch():
        expected, truth = model(x), curvature(model, x)
    before, keys, counted = [type(module) for module in model.modules()], list(model.state_dict()), Attention.subclasses
    signature = inspect.signature(model.forward)
    assert "primitives" not in repr(model)
    pr.nn.convert(model)
    assert "primitives.override_torch(" in repr(model)
    assert not pr.nn.converted(model)
    for converted in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pr.nn.convert(model)):
        assert_close(converted(x), expected)
        assert_close(curvature(converted, x), truth)
        assert list(converted.state_dict()) == keys
        assert inspect.signature(converted.forward) == signature
    assert Attention.subclasses == counted
    assert [type(module) for module in pr.nn.revert(model).modules()] == before
    assert "primitives" not in repr(model)
    try:
        served = torch.allclose(curvature(model, x), truth)
    except NotImplementedError:
        served = False
    assert not served, "plain torch is right here: the case shows nothing"


def test_a_part_that_is_run_again_is_served_again():
    torch.manual_seed(0)
    model, x = Checkpointed(Attention()).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).sin().sum(), model.part.qkv.weight)
    pr.nn.convert(model)
    assert_close(torch.autograd.grad(model(x).sin().sum(), model.part.qkv.weight), expected)
    results = []
    thread = threading.Thread(target=lambda: results.append(curvature(model.part, x)))
    thread.start()
    thread.join()
    assert_close(results, [curvature(model.part, x)])


@pytest.mark.parametrize("inside", [False, True])
def test_dropout_of_others_is_ours_by_choice_alone(inside):
    model, ones = pr.nn.convert(Checkpointed(nn.Dropout(0.5))), torch.ones(64)
    expected = pr.nn.Dropout(0.5) if inside else nn.Dropout(0.5)
    with pr.override_torch() if inside else contextlib.nullcontext():
        torch.manual_seed(0)
        y = model(ones)
    torch.manual_seed(0)
    assert torch.equal(y, expected(ones))


def test_a_model_of_others_compiles_into_one_graph():
    model, x = pr.nn.convert(Checkpointed(Attention()).double()).part, torch.randn(2, 3, 4, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_close(*[torch.autograd.grad(y.sin().sum(), model.qkv.weight) for y in (compiled(x), model(x))])
    operators = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("primitives.attention" in name for name in operators) == 1


class Weightless(nn.Module):
    """As Falcon-Mamba's, with a buffer that kernels of others read."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.register_buffer("weight", torch.ones(6))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class NormWithBuffer(Weightless):
    def forward(self, x):
        return super().forward(x) * self.weight


class ImageNorm(nn.Module):
    """Without an eps, as those of Wan and Qwen in diffusers."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x):
        return nn.functional.normalize(x, dim=1) * 6**0.5 * self.gamma


def test_norms_with_a_buffer_and_without_eps_are_served_or_named():
    assert pr.nn.converted(pr.nn.convert(Weightless()))
    for cls in (NormWithBuffer, ImageNorm):
        with pytest.warns(pr.nn.ConversionWarning, match=cls.__name__):
            assert not pr.nn.converted(pr.nn.convert(cls()))
