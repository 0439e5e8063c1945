"""Calls as a type checker knows them: `make check` reads this file, and nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import primitives as pr

x = torch.ones(2, 4)
tree = {"a": x, "b": x}


@pr.custom_op("typed::scaled")
def scaled(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return scale * x


@pr.repair_torch()
@pr.use_backend("reference")
def decorated(x: Tensor) -> int:
    return x.dim()


assert_type(pr.functional.layer_norm(x, (4,)), Tensor)
assert_type(pr.functional.softmax(tree, dim=1), dict[str, Tensor])
assert_type(pr.functional.add_rms_norm(x, x, (4,)), tuple[Tensor, Tensor])
assert_type(pr.functional.attention(x, x, x), Tensor)
assert_type(pr.functional.attention(tree, tree, tree, return_lse=True), tuple[dict[str, Tensor], dict[str, Tensor]])
assert_type(scaled(x, scale=2.0), Tensor)
assert_type(decorated(x), int)
assert_type(pr.nn.convert(torch.nn.Sequential(torch.nn.LayerNorm(4))), torch.nn.Sequential)
assert_type(pr.tracing.trace_joint(torch.sum, (x,)).primal_names, tuple[str, ...])
assert_type(pr.nn.LayerNorm(4, namespace="mine").namespace, str)
assert_type(pr.decompositions.get_decomposition(torch.ops.aten.trace)(x), Any)


def loss(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return (scale * x).sum()


pr.func.grad(loss)(x, scale=2.0)
pr.func.grad(loss)(x, size=2.0)  # type: ignore[call-arg] - a wrong name
pr.func.hessian(loss)(x, size=2.0)  # type: ignore[call-arg] - a wrong name
assert_type(pr.func.vmap(loss)(x, scale=2.0), Tensor)
assert_type(pr.func.jvp(loss, (x,), (x,)), tuple[Tensor, Tensor])
assert_type(pr.func.jvp(lambda x: (loss(x), 3), (x,), (x,), has_aux=True), tuple[Tensor, Tensor, int])
assert_type(pr.func.hvp(loss, (x,), (x,)), tuple[Tensor])
assert_type(pr.func.checkpoint(loss, x, scale=2.0), Tensor)
step, net = pr.compile(loss), pr.compile(torch.nn.Linear(4, 1))
assert_type(step(x, scale=2.0), Tensor)
step(x, size=2.0)  # type: ignore[call-arg] - a wrong name
assert_type(pr.compile(backend="eager")(loss)(x, scale=2.0), Tensor)
assert_type(list(step.graphs), list[str])
assert_type(net, torch.nn.Linear)
assert_type(pr.autograd.grad(loss(x), x), tuple[Tensor])
assert_type(pr.autograd.grad(loss(x), (x, x)), tuple[Tensor, Tensor])
assert_type(pr.autograd.grad(loss(x), net.parameters()), tuple[Tensor, ...])
assert_type(pr.autograd.grad(loss(x), tree), dict[str, Tensor])
assert_type(scaled.def_vmap(decorated)(x), int)
scaled(x, size=2.0)  # type: ignore[call-arg] - a wrong name, which is to be an error
