"""Custom operators beside torch's other features: autocast, saved tensors, threads, pickling."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import primitives as pr
from tests.custom_ops import Affine, affine, plain_affine
from tests.support import assert_close
from tests.test_custom_op import arguments, scalar, trees_close


def test_autocast():
    @pr.custom_op("tests::cast")
    def cast(params, x):
        return params["w"] * x

    @cast.def_autocast("cpu")
    def _(inputs):
        return inputs._replace(params={"w": inputs.params["w"].bfloat16()}, x=inputs.x.bfloat16())

    w, x = torch.ones(3), torch.ones(3)
    assert cast({"w": w}, x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cast({"w": w}, x).dtype == torch.bfloat16


def test_saved_tensors_are_in_the_care_of_autograd():
    weight, bias, x = [value.requires_grad_() for value in arguments()]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = scalar(affine)(weight, bias, x)
    assert any(t is x for t in packed)
    expected = torch.autograd.grad(scalar(plain_affine)(weight, bias, x), (weight, bias, x))
    trees_close(torch.autograd.grad(loss, (weight, bias, x)), expected)
    again = checkpoint(scalar(affine), weight, bias, x, use_reentrant=False)
    trees_close(torch.autograd.grad(again, (weight, bias, x)), expected)
    y = affine(Affine(weight), x)[0]
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_kept_alive():
    weight, _, x = [value.requires_grad_() for value in arguments()]
    weights = {"weight": weight * 1, "bias": None}
    y, _ = affine(weights, x * 1)
    watched = [weakref.ref(y), weakref.ref(weights["weight"])]
    y.sum().backward()
    del y, weights
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_several_threads_at_once():
    results, failures = [], []

    def work(i):
        try:
            for eps in range(40):
                weight, bias, x = arguments()
                inner = functools.partial(affine, {"weight": weight, "bias": bias}, eps=float(eps % 7) + i)
                results.append(grad(lambda x, f=inner: f(x)[0].sum())(x))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(torch.equal(value, results[0]) for value in results)


class Module(torch.nn.Module):
    """A module that keeps an operator."""

    def __init__(self):
        super().__init__()
        self.op = affine
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.op({"weight": self.weight, "bias": None}, x)[0]


def test_modules_with_an_operator_are_pickled_and_copied():
    module, x = Module(), torch.ones(2, 3)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert other.op is affine
        assert_close(other(x), module(x))
