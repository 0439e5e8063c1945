"""Tensors of a user's class that a compiled function makes, and returns."""

import pytest
import torch

import primitives as pr
from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)


class Labeled(torch.Tensor):
    """As PINA's: made by the constructor, with an attribute that some methods hand on."""

    def __new__(cls, x, labels):
        return super().__new__(cls, x)

    def __init__(self, x, labels):
        self.labels = labels

    def __mul__(self, other):
        return Labeled(super().__mul__(other), self.labels)


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("made", [Labeled, lambda x, _: x.as_subclass(Other)], ids=["new", "as_subclass"])
def test_subclasses_made_inside(made):
    net = mlp()

    def function(x):
        points = made(x.clone(), ["x"]).requires_grad_()
        gradient = torch.autograd.grad(net(points).sum(), points, create_graph=True)[0]
        tangent = torch.func.jvp(lambda x: net(made(x, ["x"])).sin(), (x,), (x,))[1]
        scaled = points * 2
        scaled[0] = tangent.sum().as_subclass(torch.Tensor)
        return scaled, gradient.square().sum() + tangent.square().sum()

    compiled = plainly(function)
    for _ in range(2):
        found, truth = compiled(X), function(X)
        same([y.as_subclass(torch.Tensor) for y in found], [y.as_subclass(torch.Tensor) for y in truth])
        assert list(map(type, found)) == list(map(type, truth))
        assert vars(found[0]) == vars(truth[0])
        same(*(gradients(net, sum(y.sum() for y in ys).as_subclass(torch.Tensor)) for ys in (found, truth)))


@pytest.mark.parametrize(
    "members", [{"__slots__": ("more",)}, {"__torch_dispatch__": classmethod(lambda *args, **kwargs: NotImplemented)}]
)
def test_subclasses_that_cannot_be_made_inside(members):
    kind = type("Own", (torch.Tensor,), members)
    with pytest.raises(pr.LeafError, match=r"Own must have .*test_made_inside.py.*outside"):
        plainly(lambda x: x.as_subclass(kind).sum())(X)
