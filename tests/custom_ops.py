"""Operators that the tests share, and makers of fresh ones: all rules on trees, the reference alone, updated state."""

import dataclasses
import itertools

import optree
import torch

import primitives as pr
from perf.ops.samples import normal
from primitives._core import Primitive
from tests.support import assert_close

NAMESPACE = "tests.custom_ops"
PRIMITIVES = "primitives_test"
_numbers = itertools.count()


def define(schema="(Tensor x) -> Tensor y", *, rules=None, name=None, **options):
    """A fresh operator; `rules` are passed to the `def_*` methods of the same names."""
    op = Primitive(name or f"op{next(_numbers)}", schema, namespace=PRIMITIVES, **options)
    for kind, rule in (rules or {}).items():
        getattr(op, f"def_{kind}")(rule)
    return op


def operator(function, **options):
    """A fresh custom operator."""
    return pr.custom_op(f"tests::fresh_{next(_numbers)}", **options)(function)


@dataclasses.dataclass
class Affine:
    """Parameters of `affine`, a node of both optree's and torch's trees: compilers need the latter."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


optree.register_pytree_node(
    Affine,
    lambda node: ((node.weight, node.bias), None, ("weight", "bias")),
    lambda _, children: Affine(*children),
    namespace=NAMESPACE,
)
torch.utils._pytree.register_dataclass(Affine)


def weight_and_bias(params):
    return (params["weight"], params["bias"]) if isinstance(params, dict) else (params.weight, params.bias)


def rebuilt(params, weight, bias):
    return {"weight": weight, "bias": bias} if isinstance(params, dict) else Affine(weight, bias)


def plain_affine(params, x, eps=1e-5):
    """`y = weight * sin(x) + bias + eps`, and the mean of `x` over its last axis."""
    weight, bias = weight_and_bias(params)
    y = weight * x.sin() + eps
    return (y if bias is None else y + bias), {"mean": x.mean(-1) ** 2}


@pr.custom_op("tests::affine", namespace=NAMESPACE)
def affine(params, x, *, eps=1e-5):
    """Every derivative rule, over a dict, a dataclass and `None`s."""
    return plain_affine(params, x, eps)


@affine.def_save_for_backward
def _affine_save(inputs, output):
    # The sine is computed here; the rest is taken from the inputs, with a string in between.
    return {"params": inputs.params, "x": inputs.x, "sine": inputs.x.sin(), "label": "kept"}


@affine.def_backward
def _affine_backward(ctx, saved, y_bar, rest_bar):
    assert saved["label"] == "kept"
    weight, bias = weight_and_bias(saved["params"])
    x = saved["x"]
    mean_bar = (rest_bar["mean"] * 2 * x.mean(-1) / x.shape[-1]).unsqueeze(-1)
    needs_weight, needs_bias = weight_and_bias(ctx.needs_input_grad.params)
    weight_bar = (y_bar * saved["sine"]).sum_to_size(weight.shape) if needs_weight else None
    bias_bar = y_bar.sum_to_size(bias.shape).clone() if needs_bias else None
    # Under vmap parameters may have a batch axis that x has not.
    x_bar = (y_bar * weight * x.cos()).sum_to_size(x.shape) + mean_bar
    return {"params": rebuilt(saved["params"], weight_bar, bias_bar), "x": x_bar}


@affine.def_jvp
def _affine_jvp(inputs, output, tangents):
    weight, bias = weight_and_bias(inputs.params)
    weight_dot, bias_dot = weight_and_bias(tangents.params)
    y_dot = weight_dot * inputs.x.sin() + weight * inputs.x.cos() * tangents.x
    return y_dot if bias is None else y_dot + bias_dot, {"mean": 2 * inputs.x.mean(-1) * tangents.x.mean(-1)}


@affine.def_vmap
def _affine_vmap(info, in_dims, inputs):
    def front(value, dim, like_x):
        if value is None or dim is None:
            return value
        value = value.movedim(dim, 0)
        # A batched parameter meets rows of x: as many axes as these have.
        return value.reshape(info.batch_size, *[1] * (x_dim - value.dim() + 1), *value.shape[1:]) if like_x else value

    x_dim = inputs.x.dim() - (in_dims.x is not None)
    weight, bias = (
        front(value, dim, like_x=True)
        for value, dim in zip(weight_and_bias(inputs.params), weight_and_bias(in_dims.params), strict=True)
    )
    x = front(inputs.x, in_dims.x, like_x=False)
    y, rest = affine(rebuilt(inputs.params, weight, bias), x, eps=inputs.eps)
    return (y, rest), (0, {"mean": None if in_dims.x is None else 0})


@pr.custom_op("tests::cube", differentiate="reference")
def cube(x):
    """The reference alone."""
    return x * x * x


@pr.custom_op("tests::moving_average", mutates=("state",), differentiate="reference")
def moving_average(state, x, *, decay=0.5):
    """Update `state["mean"]` in place; the count is a number that is not a tensor."""
    state["mean"].mul_(decay).add_(x.mean(0), alpha=1 - decay)
    return x - state["mean"]


def arguments(dtype=torch.float64):
    return [normal(shape, seed).to(dtype) for seed, shape in enumerate([(3,), (3,), (2, 3)])]


def trees_close(actual, expected, order=1):
    for got, want in zip(optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True):
        assert_close(got, want, order=order)
