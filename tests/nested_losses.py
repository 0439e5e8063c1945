"""A network, losses with derivatives in them, and their derivatives: for whatever stands in the network's place."""

import functools

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacfwd

from primitives.func import grad, hessian, jacrev, jvp, vmap
from primitives.tracing import pure_module
from tests.support import data


def called(function, *args, **kwargs):
    return function(*args, **kwargs)


class Net(nn.Module):
    """Blocks, each of which may be checkpointed."""

    def __init__(self, region=called, dropout=0.0, norm=None, width=4, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.region = region
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.Identity() if norm is None else norm(width),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(width, width),
            )
            for _ in range(depth)
        ).double()

    def forward(self, x):
        for block in self.blocks:
            x = self.region(block, x)
        return x


def gradients(net, loss, **options):
    return torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True, **options)


def plain(net, x):
    return net(x).square().mean()


def penalty(net, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
    return g.square().sum()


def tangent(net, x, v=None):
    u, u_dot = jvp(net, (x,), (x.cos() if v is None else v,))
    return (u - u_dot).square().mean()


def second_tangent(net, x):
    v = x.cos()
    return jvp(lambda z: jvp(net, (z,), (v,))[1], (x,), (v,))[1].square().mean()


def third(net, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    return h.square().sum()


def laplacian(net, x):
    hessians = vmap(hessian(lambda z: net(z).sum()))(x)
    return hessians.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean()


def per_sample(net, x):
    return torch.func.vmap(torch.func.grad(lambda z: net(z).square().sum()))(x).square().mean()


def biharmonic(net, x):
    """Ends the process where a zero tangent without memory meets tensors without memory."""
    fourth = jacfwd(jacfwd(torch.func.jacrev(lambda z: net(z).sum())))
    return torch.func.vmap(fourth)(x).square().sum()


LOSSES = (plain, penalty, tangent, second_tangent, third, laplacian, per_sample, biharmonic)
X, V = data(3, 4), data(3, 4, seed=1)


def in_params(transform):
    def run(net):
        params, buffers = pure_module(net).init()
        return transform(lambda p, x: pure_module(net)(p, buffers, x)[0], params)

    return run


def dual_level(net, *, ends_first):
    with forward_ad.dual_level():
        loss = forward_ad.unpack_dual(net(forward_ad.make_dual(X, V))).tangent.square().sum()
        if not ends_first:
            return gradients(net, loss)
    return gradients(net, loss)


def gradients_that_move(net):
    with forward_ad.dual_level():
        grads = gradients(net, net(forward_ad.make_dual(X, V)).square().sum(), create_graph=True)
        moved = [forward_ad.unpack_dual(y).tangent for y in grads]
    return [*moved, *gradients(net, sum(y.square().sum() for y in moved))]


def cotangents_that_move(net):
    with forward_ad.dual_level():
        x = X.clone().requires_grad_()
        (x_bar,) = torch.autograd.grad(net(x), x, forward_ad.make_dual(V, X.cos()))
        return [y.detach() for y in forward_ad.unpack_dual(x_bar)]


def tangents(params):
    return {name: data(*p.shape, seed=i) for i, (name, p) in enumerate(params.items())}


NESTINGS = {
    **{f"backward of {loss.__name__}": lambda net, loss=loss: gradients(net, loss(net, X)) for loss in LOSSES},
    "backward in a dual level": functools.partial(dual_level, ends_first=False),
    "backward after a dual level": functools.partial(dual_level, ends_first=True),
    "tangents of gradients in a dual level": gradients_that_move,
    "tangents of cotangents in a dual level": cotangents_that_move,
    "grad of jvp": lambda net: grad(lambda x: jvp(net, (x,), (V,))[1].square().sum())(X),
    "hessian": lambda net: hessian(lambda x: net(x).square().sum())(X[0]),
    "jacrev of jacrev": lambda net: jacrev(jacrev(lambda x: net(x).square().sum()))(X[0]),
    "jacrev of jacfwd": lambda net: jacrev(jacfwd(lambda x: net(x).square().sum()))(X[0]),
    "jvp of grad per sample": lambda net: jvp(vmap(grad(lambda x: net(x).sin().sum())), (X,), (V,)),
    "jacobian in batches": lambda net: torch.autograd.functional.jacobian(net, X, vectorize=True),
    "grad in parameters of jvp": in_params(
        lambda f, p: grad(lambda p: jvp(lambda x: f(p, x), (X,), (V,))[1].square().sum())(p)
    ),
    "jvp in parameters of grad": in_params(
        lambda f, p: jvp(grad(lambda p: f(p, X).square().sum()), (p,), (tangents(p),))
    ),
    "grad per sample": in_params(
        lambda f, p: vmap(grad(lambda p, x: f(p, x[None]).square().sum()), in_dims=(None, 0))(p, X)
    ),
    "ensemble": in_params(
        lambda f, p: vmap(f, in_dims=(0, None))({name: torch.stack([x, x + 1]) for name, x in p.items()}, X)
    ),
}
