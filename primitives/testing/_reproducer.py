"""Text of a program that shows a fault: the call with its arguments, and the transform that goes wrong."""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from primitives.core.primitive import Primitive
from primitives.custom import CustomOp
from primitives.testing._code import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from primitives.testing._subject import Subject

DIFFERENCES = '''
def differences(h, x, dots, step=1e-4):
    """Central difference of fourth order."""
    at = lambda s: [y.detach() for y in h(*[v.detach() + s * d for v, d in zip(x, dots)])]
    near, far = zip(at(step), at(-step)), zip(at(2 * step), at(-2 * step))
    return [(8 * (a - b) - (c - d)) / (12 * step) for (a, b), (c, d) in zip(near, far)]


def inner(xs, ys):
    return sum((x.conj() * y).real.sum() for x, y in zip(xs, ys))


def direction(v):
    """Random, and small where `v` is small."""
    return torch.randn_like(v) * torch.where(v == 0, torch.ones_like(v.abs()), v.abs().clamp(1e-5, 1))

'''

CLOSE = "torch.testing.assert_close({got}, {want}, rtol=1e-6, atol=1e-8)"

VJP = f"""{DIFFERENCES}
dots, bars = list(map(direction, x)), list(map(torch.randn_like, f(*x)))
for chosen in [*[[i] for i in range(len(x))], range(len(x))]:  # wanted one at a time, then all together
    values = [v.detach().requires_grad_(i in chosen) for i, v in enumerate(x)]
    wanted, along = [values[i] for i in chosen], [dots[i] for i in chosen]
    x_bar = torch.autograd.grad(f(*values), wanted, bars, allow_unused=True, materialize_grads=True)
    other = [d if i in chosen else torch.zeros_like(d) for i, d in enumerate(dots)]
    quotients = differences(f, x, other)
    {CLOSE.format(got="inner(x_bar, along)", want="inner(bars, quotients)")}
    for k, bar in enumerate(bars):  # with a single result used
        y = f(*values)[k]
        if y.requires_grad:
            x_bar = torch.autograd.grad(y, wanted, bar, allow_unused=True, materialize_grads=True)
            {CLOSE.format(got="inner(x_bar, along)", want="inner([bar], [quotients[k]])")}
"""

JVP = f"""{DIFFERENCES}
for i in range(len(x)):  # a tangent of one argument at a time
    dots = [direction(v) if i == j else torch.zeros_like(v) for j, v in enumerate(x)]
    y_dot = torch.func.jvp(f, tuple(x), tuple(dots))[1]
    {CLOSE.format(got="list(y_dot)", want="differences(f, x, dots)")}
"""

TRANSPOSE = f"""{DIFFERENCES}
dots, bars = list(map(direction, x)), list(map(torch.randn_like, f(*x)))
y_dot = torch.func.jvp(f, tuple(x), tuple(dots))[1]
x_bar = torch.func.vjp(f, *x)[1](tuple(bars))
{CLOSE.format(got="inner(bars, y_dot)", want="inner(x_bar, dots)")}
"""

VJP_OF_VJP = f"""{DIFFERENCES}
bars = list(map(torch.randn_like, f(*x)))


def pulled_back(*values):
    return torch.func.vjp(f, *values[: len(x)])[1](tuple(values[len(x) :]))


values = [*x, *bars]
dots, weights = list(map(direction, values)), list(map(torch.randn_like, x))
second = torch.func.vjp(pulled_back, *values)[1](tuple(weights))
{CLOSE.format(got="inner(second, dots)", want="inner(weights, differences(pulled_back, values, dots))")}
"""


def nesting(word: str) -> str:
    """Program part for a nesting of transforms against differences of the transforms inside."""
    lines = [DIFFERENCES, "h = f"]
    for i, letter in enumerate(reversed(word)):
        last = i == len(word) - 1
        lines.append("d = tuple(map(torch.randn_like, h(*x)))" if letter == "r" else "d = tuple(map(direction, x))")
        outer = "outer" if last else "h"
        if letter == "f":
            lines.append(f"{outer} = lambda *x, h=h, d=d: torch.func.jvp(h, x, d)[1]")
        else:
            lines.append(f"{outer} = lambda *x, h=h, d=d: torch.func.vjp(h, *x)[1](d)")
    if word[0] == "f":
        lines.append(CLOSE.format(got="list(outer(*x))", want="differences(h, x, d)"))
    else:
        lines.append("dots = list(map(direction, x))")
        lines.append(CLOSE.format(got="inner(outer(*x), dots)", want="inner(d, differences(h, x, dots))"))
    return "\n".join(lines) + "\n"


REFERENCE = """
for got, want in zip(f(*x), [y for y in optree.tree_leaves(reference(*args, **static)) if torch.is_tensor(y)]):
    torch.testing.assert_close(got, want)
"""

DETERMINISM = """
for got, want in zip(f(*x), f(*x)):
    torch.testing.assert_close(got, want, rtol=0, atol=0)
"""

MUTATION = """
before = [v.clone() for v in leaves if torch.is_tensor(v)]
f(*x)
for got, want in zip([v for v in leaves if torch.is_tensor(v)], before):
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got._version == 0
"""

ALIASING = """
memory = [v.untyped_storage().data_ptr() for v in leaves if torch.is_tensor(v)]
for y in optree.tree_leaves(op(*args, **static)):
    assert y.untyped_storage().data_ptr() not in memory
"""

COMPILE = """
compiled = torch.compile(lambda args: op(*args, **static), fullgraph=True, backend="aot_eager")
for got, want in zip(optree.tree_leaves(compiled(args)), optree.tree_leaves(op(*args, **static))):
    torch.testing.assert_close(got, want)
"""

ARRANGED = {
    "contiguous": "v.contiguous()",
    "transposed": "v.permute(*range(v.dim())[::-1]).contiguous().permute(*range(v.dim())[::-1])",
    "sliced": "torch.stack([v, v], -1)[..., 0]",
    "expanded": "v[:1].expand(v.shape) if v.dim() else v",
    "constant": "v[(0,) * v.dim()].expand(v.shape)",
}


def at_dtypes(kind: str, allowed: float) -> str:
    """Program part for the vjp or jvp at the dtypes of the arguments against that in double precision."""
    if kind == "vjp":
        derive = """
    x = [v.detach().requires_grad_() for v in x]
    return torch.autograd.grad(f(*x), x, given, allow_unused=True, materialize_grads=True)"""
    else:
        derive = """
    return torch.func.jvp(f, tuple(x), tuple(given))[1]"""
    return f"""
def derive(x, given):{derive}


def widen(v):
    return v.to(torch.promote_types(v.dtype, torch.float64))


given = list(map(torch.randn_like, {"f(*x)" if kind == "vjp" else "x"}))
gots, wants = derive(x, given), derive(list(map(widen, x)), list(map(widen, given)))
for got, want in zip(gots, wants):
    torch.testing.assert_close(widen(got), want, rtol=0, atol={allowed:.2g})
"""


def vmap(positions: Sequence[int], axis: int) -> str:
    """Program part for a batch of the tensors at `positions`, along `axis`."""
    return f"""
tensors = [i for i, v in enumerate(leaves) if torch.is_tensor(v)]


def g(*tensors_):
    given = dict(zip(tensors, tensors_))
    output = op(*tree.unflatten(given.get(i, leaf) for i, leaf in enumerate(leaves)), **static)
    return tuple(y for y in optree.tree_leaves(output) if torch.is_tensor(y))


full, axes = [leaves[i] for i in tensors], [None] * len(tensors)
for i in {list(positions)}:
    v, axes[i] = full[i], {axis}
    inexact = v.is_floating_point() or v.is_complex()
    samples = [v * (1 + k) if inexact else v.flatten().roll(k).reshape(v.shape) for k in range(3)]
    full[i] = torch.stack(samples, {axis})
rows = [g(*[v if a is None else v.select(a, k) for v, a in zip(full, axes)]) for k in range(3)]
for got, *want in zip(torch.func.vmap(g, tuple(axes))(*full), *rows):
    torch.testing.assert_close(got, torch.stack(want))
"""


def cotangent_layout(layout: str) -> str:
    """Program part for a vjp of a cotangent with other strides."""
    return f"""
x = [v.requires_grad_() for v in x]
bars = [{ARRANGED[layout]} for v in map(torch.randn_like, f(*x))]
got, want = (
    torch.autograd.grad(f(*x), x, b, allow_unused=True, materialize_grads=True)
    for b in (bars, [bar.clone(memory_format=torch.contiguous_format) for bar in bars])
)
torch.testing.assert_close(got, want)
"""


def input_layout(layout: str) -> str:
    """Program part for arguments with other strides."""
    return f"""
x = [{ARRANGED[layout]} for v in x]
torch.testing.assert_close(f(*x), f(*[v.clone(memory_format=torch.contiguous_format) for v in x]))
"""


def fake(layout: str) -> str:
    """Program part for tensors without data."""
    return f"""
from torch._subclasses import FakeTensorMode

leaves = [{ARRANGED[layout]} if torch.is_tensor(v) else v for v in leaves]
with FakeTensorMode() as mode:
    fakes = [mode.from_tensor(v) if torch.is_tensor(v) else v for v in leaves]
    got = optree.tree_leaves(op(*tree.unflatten(fakes), **static))
want = optree.tree_leaves(op(*tree.unflatten(leaves), **static))
for a, b in zip(got, want):
    assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), (a, b.shape, b.dtype, b.stride())
"""


def program(subject: Subject, transform: str, rule: str, backend: str, *, double: bool) -> str:
    """The whole program.

    Args:
        subject: The call.
        transform: Code that sees `op`, `args`, `static`, `x` (the differentiable tensors) and `f` (the
            differentiable results of them). Without any, the program checks the property by name.
        rule: Name of the property.
        backend: Backend that the property ran under.
        double: Whether `x` and all other floating and complex tensors are made double.
    """
    modules: dict[str, None] = {}
    remarks: dict[str, None] = {}
    args = ", ".join(code_of(arg, modules, remarks) for arg in subject.args)
    static = ", ".join(f"{name!r}: {code_of(value, modules, remarks)}" for name, value in subject.static.items())
    lines = ["import optree", "import torch", "", "import primitives as pr"]
    lines += [f"import {module}" for module in sorted(modules)]
    if not transform:
        lines.append("from primitives.testing import check_rule")
    lines += [
        _import_of(subject.op),
        "",
        "torch.manual_seed(0)",
        *remarks,
        f"args = ({args}{',' if len(subject.args) == 1 else ''})",
        f"static = {{{static}}}",
    ]
    if backend != "auto":
        lines.append(f"pr.use_backend({backend!r}).__enter__()")
    if not transform:
        options = "" if not subject.namespace else f", tree_namespace={subject.namespace!r}"
        lines.append(f"check_rule(op, {rule!r}, *args{options}, **static)")
        return "\n".join(lines) + "\n"
    where = "" if not subject.namespace else f", namespace={subject.namespace!r}"
    lines += [
        f"leaves, tree = optree.tree_flatten(args{where})",
        f"places, outputs = {[subject.places[i] for i in subject.inputs]}, {_outputs(subject)}",
        *(
            [
                "widen = lambda v: v.to(torch.promote_types(v.dtype, torch.float64))",
                "inexact = lambda v: torch.is_tensor(v) and (v.is_floating_point() or v.is_complex())",
                "leaves = [widen(v) if inexact(v) else v for v in leaves]",
            ]
            if double
            else []
        ),
        "x = [leaves[i] for i in places]",
        *([f"reference = {_reference_code(subject)}"] if "reference(" in transform else []),
        "",
        "",
        "def f(*x):",
        "    given = dict(zip(places, x))",
        "    values = [given.get(i, leaf) for i, leaf in enumerate(leaves)]",
        f"    output = {'op.pure' if subject.mutates else 'op'}(*tree.unflatten(values), **static)",
        f"    results = [y for y in optree.tree_leaves(output{where}) if torch.is_tensor(y)]",
        "    return tuple(results[i] for i in outputs)",
        "",
    ]
    return "\n".join(lines) + "\n" + transform.lstrip("\n")


def _outputs(subject: Subject) -> list[int]:
    try:
        return subject.outputs
    except Exception:
        return [0]


def _reference_code(subject: Subject) -> str:
    return 'op.rule("reference")' if isinstance(subject.op, Primitive) else "op.__wrapped__"


def _import_of(op: Any) -> str:
    """Line that gives the operator the name `op`."""
    function: Callable = op.__wrapped__ if isinstance(op, CustomOp) else op
    if isinstance(op, Primitive):
        function = op.rule("reference")
    module, path = function.__module__, getattr(function, "__qualname__", "")
    if isinstance(op, Primitive):
        line = "" if module.startswith("primitives.") else f"import {module}\n"
        return (
            f"{line}from primitives.core import registered_primitives\n\n"
            f"op = registered_primitives()[{op.qualified_name!r}]"
        )
    name = _name_in(module, path, op)
    if name is not None:
        return f"from {module} import {name}\n\nop = {name}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
    if isinstance(op, CustomOp):
        return (
            f"from primitives.custom._operator import find\n\n# Defined at {place}.\nop = find({op.qualified_name!r})"
        )
    return f"# op is {path} of {place}, which no import reaches."


def _name_in(module: str, path: str, op: Any) -> str | None:
    """Name under which a module holds the operator, first of all that of its function."""
    names = {} if module == "__main__" else vars(sys.modules.get(module, types))
    if names.get(path) is op:
        return path
    return next((name for name, value in names.items() if value is op), None)
