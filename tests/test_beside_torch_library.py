"""`torch.library.custom_op` and `primitives.custom_op` with the same operator: the table in the docs.

Values are compared with those of plain torch in float64, and an error about a mistake in a rule has to name the
operator, the argument and the file of the rule.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import primitives as pr

NAMESPACE = "beside_torch_library"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "beside_torch_library.md"
RIGHT, WRONG, RAISES = "right", "wrong", "raises"
# Float64 rounding stays far below, and no wrong value comes near.
TOLERANCE = 1e-8
# Where operators are called, and with what weights or tangents.
POINT, DIRECTION = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]], dtype=torch.float64)
POINTS = torch.stack([POINT, 2 * POINT])


class Operators(NamedTuple):
    """An operator of either side, and the function that both are made of."""

    library: Any
    here: Any
    plain: Callable


def _operators(name: str, function: Callable, save: Any = None, backward: Any = None, **options: Any) -> Operators:
    """Both with the same rules: `save` takes the inputs, `backward` what was saved and the cotangent."""
    qualname, mutates = f"{NAMESPACE}::library_{name}", options.get("mutates", ())
    try:
        library: Any = torch.library.custom_op(qualname, function, mutates_args=mutates)
        library.register_fake(lambda *args: torch.empty_like(args[-1]))
    except ValueError:
        # Arguments that torch takes in no operator: whoever calls it is told.
        library = lambda *_: torch.library.custom_op(qualname, function, mutates_args=mutates)  # noqa: E731 - one use
    here = pr.custom_op(f"{NAMESPACE}::{name}", **options)(function)
    if backward is not None:
        names = list(inspect.signature(function).parameters)
        library.register_autograd(
            lambda ctx, y_bar: backward(ctx.saved_tensors, y_bar),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*save(*inputs)),
        )
        here.def_save_for_backward(lambda inputs, output: save(*inputs))
        here.def_backward(lambda ctx, saved, y_bar: dict(zip(names, backward(saved, y_bar), strict=False)))
    return Operators(library, here, function)


def _scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.sin() * weight


def _scale_backward(saved: Any, y_bar: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = saved
    return y_bar * weight * x.cos(), y_bar * x.sin()


SCALE = _operators("scale", _scale, lambda x, weight: (x, weight), _scale_backward)
SCALE.here.def_jvp(lambda inputs, y, dots: dots.x * inputs.x.cos() * inputs.weight + inputs.x.sin() * dots.weight)


# Probes: what is done with an operator of x and weight.


def _tracked() -> list[torch.Tensor]:
    return [POINT.clone().requires_grad_(), DIRECTION.clone().requires_grad_()]


def _loss(op: Callable) -> Callable[..., torch.Tensor]:
    return lambda *args: op(*args).square().sum()


def _compiled(function: Callable) -> Callable:
    # The backend matters to no case, and this one needs no C++ compiler.
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _gradient(op: Callable, call: Callable = lambda function, *args: function(*args)) -> Any:
    leaves = _tracked()
    return torch.autograd.grad(call(_loss(op), *leaves), leaves)


def _second_derivative(op: Callable, count: int = 2) -> Any:
    leaves = _tracked()[:count]
    bars = torch.autograd.grad(_loss(op)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(torch.stack(bars).sum(), leaves)


def _batch_of_cotangents(op: Callable) -> Any:
    leaves = _tracked()
    return torch.autograd.grad(op(*leaves), leaves, torch.eye(3, dtype=torch.float64), is_grads_batched=True)


def _dual_number(op: Callable) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(op(forward_ad.make_dual(POINT, DIRECTION), DIRECTION)).tangent


def _jvp(function: Callable, wrapped: Callable = lambda transform: transform) -> Any:
    return wrapped(lambda x, weight: jvp(function, (x, weight), (weight, x))[1])(POINT, DIRECTION)


def _exported(op: Callable) -> Any:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x, DIRECTION)

    return torch.export.export(Module(), (POINT,)).module()(POINT)


PROBES: dict[str, Callable[[Any], Any]] = {
    "gradient": _gradient,
    "gradient of a gradient": _second_derivative,
    "batch of cotangents (`is_grads_batched`)": _batch_of_cotangents,
    "gradient under checkpointing": lambda op: _gradient(op, partial(checkpoint, use_reentrant=False)),
    "`forward_ad`": _dual_number,
    "`torch.func.jvp`": _jvp,
    "`torch.func.grad`": lambda op: grad(_loss(op), (0, 1))(POINT, DIRECTION),
    "`torch.func.hessian`": lambda op: hessian(_loss(op), (0, 1))(POINT, DIRECTION),
    "Hessian-vector product, `jvp(grad)`": lambda op: _jvp(grad(_loss(op))),
    "`vmap` without a rule": lambda op: vmap(op, (0, None))(POINTS, DIRECTION),
    "gradient per sample, `vmap(grad)`": lambda op: vmap(grad(_loss(op), (0, 1)), (0, None))(POINTS, DIRECTION),
    "gradient of a compiled call": lambda op: _gradient(_compiled(op)),
    "`torch.func.grad` inside compile": lambda op: _compiled(grad(_loss(op), (0, 1)))(POINT, DIRECTION),
    "`torch.func.jvp` inside compile": lambda op: _jvp(op, _compiled),
    "`torch.export`": _exported,
}


# Other operators: without rules, with one that saves what it computed, of trees and settings, and one that writes.


def _sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _plus(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.sin() if bias is None else x.sin() + bias


def _affine(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": x.sin() * params["weight"]}


def _settings(x: torch.Tensor, config: tuple[str, tuple[float, int]]) -> torch.Tensor:
    return x * config[1][0]


def _update(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.mul_(0.5).add_(x)
    return x * 2


def _updated(op: Any, transform: Callable = lambda function: function(POINT)) -> Any:
    """The update of a state that lives inside of a transformed function."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = DIRECTION + 0 * x
        return op.pure(state, x) if hasattr(op, "pure") else (op(state, x), state)

    return transform(function)


# Backward rules of `x + weight` with a mistake in the second cotangent.
MISTAKES: dict[str, Callable[[torch.Tensor], tuple]] = {
    "a cotangent of another shape": lambda y_bar: (y_bar, y_bar[:2]),
    "a cotangent of another dtype": lambda y_bar: (y_bar, y_bar.bfloat16()),
    "a cotangent is missing": lambda y_bar: (y_bar,),
    "a cotangent is not a tensor": lambda y_bar: (y_bar, 0.0),
}


def _mistaken(title: str, rule: Callable[[torch.Tensor], tuple]) -> Operators:
    return _operators(title.replace(" ", "_"), _scale, lambda x, weight: (), lambda saved, y_bar: rule(y_bar))


def cases() -> list[tuple[str, Callable[[Any], Any], Operators]]:
    """Name of a row, what is done with either operator, and the operators."""
    saving = _operators("saving", _sine, lambda x: (x.cos(),), lambda saved, y_bar: (y_bar * saved[0],))
    plus = _operators("plus", _plus, differentiate="reference")
    affine = _operators("affine", _affine, differentiate="reference")
    update = _operators("update", _update, mutates=("state",), differentiate="reference")
    return [
        *((name, probe, SCALE) for name, probe in PROBES.items()),
        ("gradient of a gradient where the rule saves what it computed", partial(_second_derivative, count=1), saving),
        ('gradient without a rule, `differentiate="reference"` here', _gradient, plus),
        ("`torch.func.jvp` of the same", _jvp, plus),
        ("tensors in a dict, with gradient", lambda op: _gradient(lambda x, w: op({"weight": w}, x)["y"]), affine),
        ("`None` for a tensor", lambda op: (op(POINT, None), op(POINT, DIRECTION)), plus),
        (
            "a setting that is a tuple of a string and a tuple",
            lambda op: op(POINT, ("by", (2.0, 3))),
            _operators("settings", _settings),
        ),
        ("update of a state", _updated, update),
        ("update of a state, compiled", partial(_updated, transform=lambda f: _compiled(f)(POINT)), update),
        (
            "update of a state, `torch.func.jvp`",
            partial(_updated, transform=lambda f: jvp(f, (POINT,), (DIRECTION,))[1]),
            update,
        ),
        ("update of a state, `vmap`", partial(_updated, transform=lambda f: vmap(f)(POINTS)), update),
        *((f"mistake: {title}", _gradient, _mistaken(title, rule)) for title, rule in MISTAKES.items()),
    ]


def _outcome(name: str, probe: Callable[[Any], Any], op: Any, plain: Callable) -> str:
    """`RIGHT`, `WRONG` (without an error) or `RAISES`."""
    torch._dynamo.reset()
    is_mistake, operator = name.startswith("mistake"), name.split(": ")[-1].replace(" ", "_")
    try:
        value = probe(op)
    except Exception as error:
        due = (operator, "weight", Path(__file__).name) if is_mistake else ()
        return RIGHT if due and all(word in str(error) for word in due) else RAISES
    if is_mistake or value is None:
        return WRONG
    x, y = (torch.cat([leaf.flatten() for leaf in optree.tree_leaves(tree)]) for tree in (value, probe(plain)))
    return RIGHT if (x - y).abs().nan_to_num(float("inf")).max() <= TOLERANCE else WRONG


CASES = {name: (probe, operators) for name, probe, operators in cases()}
ROWS = dict(re.findall(r"^\| ([^|]+) \| (right|wrong|raises)[^|]*\|$", PAGE.read_text("utf-8"), re.MULTILINE))


# torch.library warns of what the table shows, and compilers log it.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_table_says_what_comes_out(name):
    probe, operators = CASES[name]
    assert _outcome(name, probe, operators.here, operators.plain) == RIGHT
    if torch.__version__.startswith("2.13."):
        assert _outcome(name, probe, operators.library, operators.plain) == ROWS[name]


def test_the_table_has_every_row_and_the_comparison_counts_them():
    assert list(ROWS) == list(CASES)
    kinds = list(ROWS.values())
    comparison = (PAGE.parent.parent / "explanation" / "comparison.md").read_text(encoding="utf-8")
    assert f"{len(kinds)} things done with `torch.library.custom_op`" in comparison
    assert f"{kinds.count(RIGHT)} right, {kinds.count(WRONG)} silently wrong" in comparison
    assert f"{kinds.count(RAISES)} raise (`torch.func.grad`" in comparison
