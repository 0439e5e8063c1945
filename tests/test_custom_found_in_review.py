"""What reviewers found in custom operators: each was silently wrong, or failed, once."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from primitives.core.errors import LeafError
from tests.support import assert_close

_numbers = itertools.count()
X = torch.linspace(-1.5, 2, 6).reshape(2, 3)


def operator(function, **options):
    return pr.custom_op(f"tests::reviewed_{next(_numbers)}", **options)(function)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("differentiate", ["eager", "grad", "compiled"])
def test_a_random_reference_is_differentiated_with_the_numbers_that_it_drew(differentiate):
    drop = operator(lambda x: x * (torch.rand_like(x) < 0.5), differentiate="reference")
    x = torch.ones(64, requires_grad=True)
    if differentiate == "grad":
        x_bar, y = grad(lambda x: (drop(x).sum(), drop(x).detach() * 0), has_aux=True)(x.detach())
        kept = []

        def noted(x):
            y = drop(x)
            kept.append(y.detach())
            return y.sum()

        x_bar = grad(noted)(x.detach())
        y = torch._C._functorch.unwrap_if_dead(kept[0])
    else:
        y = (drop if differentiate == "eager" else compiled(drop))(x)
        (x_bar,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(x_bar, y.detach())


class Config(NamedTuple):
    """A static argument."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A static argument."""

    value: Any


@pytest.mark.parametrize(
    "kind", [Config, Frozen, lambda value: (Config(value), "more")], ids=["namedtuple", "dataclass", "nested"]
)
def test_static_values_in_containers_are_told_apart(kind):
    def value_of(config):
        return config[0].value if type(config) is tuple else config.value

    op = operator(lambda x, *, c: x + 0.5 if isinstance(value_of(c), float) else x + 1)
    assert [op(X[0, :1] * 0, c=kind(v)).item() for v in (2, 2.0, 2)] == [1, 0.5, 1]
    copysign = operator(lambda x, *, c: torch.copysign(x, torch.tensor(value_of(c))))
    assert [copysign(torch.ones(1), c=kind(v)).item() for v in (0.0, -0.0)] == [1, -1]
    numbers = {op.table.flatten((X,), {"c": kind(float("nan"))})[1].number for _ in range(3)}
    assert len(numbers) == 1


def test_the_order_of_a_dict_is_the_callers():
    op = operator(lambda d: torch.stack(list(d.values())))
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert op({"b": one, "a": two}).tolist() == [1, 2]
    assert op({"a": two, "b": one}).tolist() == [2, 1]
    assert op({"b": one, "a": two}).tolist() == [1, 2]


def test_the_same_keys_with_other_values_are_another_tree():
    def total(d, x):
        return x + sum(leaf if isinstance(leaf, torch.Tensor) else 0 for leaf in optree.tree_leaves(d))

    op, one = operator(total), torch.tensor(1.0)
    for tree in ({"a": one, "b": one}, {"a": one, "b": 3}, {"a": [one, one], "b": one}, {"a": None, "b": one}) * 2:
        assert op(tree, one) == total(tree, one)


def test_a_vmap_rule_is_held_to_the_reference_even_if_it_runs_first():
    op = operator(lambda x: {"y": x * 2})
    op.def_vmap(lambda info, dims, inputs: ([inputs.x * 2], [dims.x]))
    with pytest.raises(pr.TreeError, match=r"def_vmap .* must return a result with the tree of the reference's"):
        vmap(op)(X)
    assert torch.equal(op(X)["y"], X * 2)
    short = operator(lambda x: x * 2)
    short.def_vmap(lambda info, dims, inputs: (inputs.x[:1] * 2, 0))
    with pytest.raises(pr.ShapeError, match=r"output must have 2 samples along axis 0, got shape \[1, 3\]"):
        vmap(short)(X)
    same = operator(lambda x: x * 1)
    same.def_vmap(lambda info, dims, inputs: (inputs.x, 0))
    x = X.clone()
    vmap(same)(x).add_(1)
    assert torch.equal(x, X)


def test_a_kernel_is_held_to_a_reference_that_needs_data():
    op = operator(lambda x: (x * x.sum().item(), x.sum()))
    op.def_kernel("cpu")(lambda x: [x * 2, x.sum()])
    with pytest.raises(pr.TreeError, match="must return a result with the tree of the reference's"):
        op(X)


@pytest.mark.filterwarnings("ignore:.*vmap runs a loop")
def test_the_loop_of_vmap_respects_randomness():
    noise = operator(lambda x: x + torch.rand_like(x))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(noise)(X)
    first, second = vmap(noise, randomness="same")(X * 0)
    assert torch.equal(first, second)
    first, second = vmap(noise, randomness="different")(X * 0)
    assert not torch.equal(first, second)


class Result(NamedTuple):
    """A result."""

    y: torch.Tensor
    z: torch.Tensor | None


def test_namedtuples_are_compiled():
    op = operator(lambda pair: Result(pair[0] * 2, pair[0].sum()), differentiate="reference")
    assert_close(compiled(lambda x: op(Result(x, None)).y * op((x, x)).z)(X), X * 2 * X.sum())


def test_none_in_other_containers_is_compiled():
    op = operator(lambda tree: tree["a"] * (1 if tree["b"] is None else tree["b"]), differentiate="reference")
    assert_close(compiled(lambda x: op(collections.OrderedDict(a=x, b=None)))(X), X)
    assert_close(compiled(lambda x: op(collections.defaultdict(int, a=x, b=None)))(X), X)


def test_static_values_from_shapes_and_numbers_that_change_are_compiled():
    shaped = operator(lambda x, *, shape: x.reshape(shape) * 1, differentiate="reference")
    fast = compiled(lambda x: shaped(x, shape=x.shape))
    for rows in (2, 4, 5):
        assert fast(torch.ones(rows, 3)).shape == (rows, 3)
    scaled = operator(lambda d: d["x"] * d["n"], differentiate="reference")
    for numbers in ((2, 3, 4), (2.0, 3.0, 0.5)):
        fast = compiled(lambda x, n: scaled({"x": x, "n": n}))
        for number in numbers:
            assert_close(fast(X, number), X * number)


def test_updates_of_memory_that_is_shared_are_refused():
    two = operator(lambda a, b, x: (a.add_(x), b.add_(x), x * 1)[2], mutates=("a", "b"))
    buffer = torch.zeros(3)
    for first, second in ((buffer, buffer.view(3)), (buffer[:2], buffer[1:])):
        with pytest.raises(pr.MutationError, match="a is updated in place and shares memory with b"):
            two(first, second, torch.ones(()))
    two(buffer[:1], buffer[2:], torch.ones(()))
    assert buffer.tolist() == [1, 0, 1]
    one = operator(lambda state, x: (state.add_(1), x * 2)[1], mutates=("state",))
    with pytest.raises(pr.MutationError, match="state is updated in place and shares memory with x"):
        one(buffer, buffer)


def test_a_view_of_the_state_may_be_saved():
    op = operator(lambda state, x: (state.add_(1), x * 2)[1], mutates=("state",))
    op.def_save_for_backward(lambda inputs, output: (inputs.state[:], inputs.x))
    op.def_backward(lambda ctx, saved, y_bar: {"state": None, "x": 2 * y_bar + 0 * saved[0]})
    x = torch.ones(3, requires_grad=True)
    op(torch.zeros(3), x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_computed_residual_does_not_keep_the_output():
    op = operator(lambda x: x.sin())
    op.def_save_for_backward(lambda inputs, output: inputs.x.cos())
    op.def_backward(lambda ctx, cosine, y_bar: {"x": y_bar * cosine})
    x = X.clone().requires_grad_()
    y = op(x)
    y.mul_(2)
    y.sum().backward()
    assert_close(x.grad, 2 * X.cos())
    assert_close(grad(lambda x: grad(lambda x: op(x).sum())(x).sum())(X), -X.sin())


def test_outputs_that_share_memory_are_refused():
    def twice(x):
        y = x * 2
        return y, {"again": y[:1]}

    with pytest.raises(LeafError, match=r"output\[1\]\['again'\] shares its memory with output\[0\]; return a clone"):
        operator(twice)(X)


def test_autocast_may_change_static_arguments_in_the_first_call():
    op = operator(lambda x, *, k=1: {"y": x * k})
    op.def_autocast("cpu")(lambda inputs: inputs._replace(x=inputs.x.bfloat16(), k=2))
    with torch.autocast("cpu"):
        y = op(X)["y"]
    assert y.dtype == torch.bfloat16
    assert_close(y, (X * 2).bfloat16())


def test_autocast_of_an_operator_that_updates_its_state_in_the_first_call():
    op = operator(lambda state, x: (state.add_(x.sum()), x * 2)[1], mutates=("state",))
    op.def_autocast("cpu")(lambda inputs: inputs._replace(x=inputs.x.bfloat16()))
    state = torch.zeros(())
    with torch.autocast("cpu"):
        y = op(state, torch.ones(2))
    assert (y.dtype, y.tolist(), state.item()) == (torch.bfloat16, [2, 2], 2)


class Cube(torch.autograd.Function):
    """For def_autograd."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, y_bar):
        (x,) = ctx.saved_tensors
        return 3 * x * x * y_bar


def test_def_autograd_takes_an_autograd_function():
    op = operator(lambda x: x**3)
    op.def_autograd(Cube.apply)
    x = X.clone().requires_grad_()
    assert_close(torch.autograd.grad(op(x).sum(), x)[0], 3 * X**2)


def test_graph_nodes_are_named_after_the_operator():
    op = pr.custom_op("tests::named_node", differentiate="reference")(lambda x: x * 2)
    op.def_jvp(lambda inputs, output, tangents: tangents.x * 2)
    op.def_save_for_backward(lambda inputs, output: ())
    op.def_backward(lambda ctx, saved, y_bar: {"x": 2 * y_bar})
    assert type(op(X.clone().requires_grad_()).grad_fn).__name__ == "NamedNodeBackward"
    assert_close(jvp(op, (X,), (X,))[1], 2 * X)


def test_defining_the_same_function_again_replaces_the_operator():
    def define(factor, **options):
        @pr.custom_op("tests::cell", **options)
        def cell(x):
            return x * factor

        return cell

    first = define(2, differentiate="reference")
    first.def_autocast("cpu")(lambda inputs: inputs._replace(x=inputs.x.bfloat16()))
    first.def_jvp(lambda inputs, output, tangents: tangents.x * 100)
    assert jvp(first, (X,), (X,))[1][0, 0] == X[0, 0] * 100
    second = define(3)
    assert_close(second(X), X * 3)
    assert torch.ops.tests.cell.default is second.primitive.overload
    with torch.autocast("cpu"):
        assert second(X).dtype == torch.float32
    with pytest.raises(pr.MissingRuleError):
        second(X.clone().requires_grad_())
    with pytest.raises(pr.MissingRuleError):
        jvp(second, (X,), (X,))
    second.def_jvp(lambda inputs, output, tangents: tangents.x * 3)
    assert_close(jvp(second, (X,), (X,))[1], X * 3)
    with pytest.raises(ValueError, match="tests::cell exists already"):
        pr.custom_op("tests::cell")(lambda x: x)
