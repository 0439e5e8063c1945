"""Find out what the `forward` of a norm that somebody wrote computes, by running it on inputs that tell forms apart.

It runs on a twin: an object of the class with the module's attributes, new parameters and buffers on the CPU, and no
hooks. The module itself, the states of random generators and everything that it refers to stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from primitives import functional
from primitives._audit.nestings import InFloat64
from primitives._override import override_except_dropout
from primitives.nn._norms import Form, Rounding, batch_normed, computed, is_relu_alone
from primitives.nn._twin import OF_ANY_MODULE, Twin, epsilons, own, random

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["SERVED", "Verdict", "configuration", "examined", "looks_like_a_norm"]

SERVED = "served"
_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)
_SCALE_AND_SHIFT = 2
_LOW = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float64, torch.float32, *_LOW)
_SIMPLE = (bool, int, float, str, tuple, torch.Size, type(None))
# The parts of norms. Of another operation, as a clamp or a comparison, a few inputs do not show all.
_PLAIN = re.compile(
    "add_?|r?sub|mul|div|reciprocal|neg|(float_)?pow(er)?|square|r?sqrt|mean|sum|var(_mean)?|std|(linalg_vector_)?norm|"
    "native_(layer|batch)_norm|_fused_rms_norm|_to_copy|detach|alias|clone|copy_|lift_fresh|(_unsafe_)?view|expand|(un)?squeeze|"
    "permute|transpose|t|b?mm|(new_)?(ones|zeros|full|empty)(_like)?|scalar_tensor"
)
# Enough elements that a rounding at another place shows, and at least the digits that sums of another order leave.
_ELEMENTS = 4096
_EQUAL = 0.99
_EXACT = 1e-9
# A module may compute float64 in float32.
_CLOSE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Verdict(NamedTuple):
    """The form of a module, `SERVED` if its `forward` is served as it is written, or None and the reason.

    A tuple has the numbers of axes of inputs of which it makes a batch norm and a ReLU.
    """

    form: Form | tuple[int, ...] | str | None
    reason: str = ""


def looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether a module with a `forward` of its own is worth a check: it has what a norm has, and no more."""
    if isinstance(module, _NORMS):
        return True
    parameters = list(own(module._parameters).values())
    if not parametrize.is_parametrized(module):
        parts = itertools.chain.from_iterable((*p.parameters(), *p.buffers()) for p in module.children())
        # Of whole numbers the twin has zeros, which may hide what they do.
        if next(parts, None) is not None or not all(map(torch.is_floating_point, own(module._buffers).values())):
            return False
    are_alike = len(parameters) <= _SCALE_AND_SHIFT and len({p.shape for p in parameters}) <= 1
    return are_alike and (bool(epsilons(module)) or "norm" in type(module).__name__.lower())


def _is_worth_a_word(module: torch.nn.Module) -> bool:
    """Whether one would expect a module to be a norm, by two of an eps, parameters, and its name."""
    has_own = bool(module._parameters) or parametrize.is_parametrized(module)
    return isinstance(module, _NORMS) or bool(epsilons(module)) + has_own + ("norm" in repr(module).lower()) > 1


def _obstacle(module: torch.nn.Module) -> str:
    """Why a module that looks like a norm cannot be checked; empty if it can."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    for name, value in own(module._parameters).items():
        if type(value) not in (torch.nn.Parameter, torch.Tensor):
            return f"its {name} is a {type(value).__name__}"
        if value.dtype not in _DTYPES:
            return f"its {name} is of dtype {value.dtype}"
    return ""


def configuration(module: torch.nn.Module, cls: type) -> tuple:
    """The key of the result of a check: two modules that agree in it compute alike."""
    attributes = [
        (name, repr(value) if isinstance(value, _SIMPLE) else id(value))
        for name, value in vars(module).items()
        if name not in OF_ANY_MODULE
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), type(value), value.dtype in _DTYPES))
        for name, value in itertools.chain(module._parameters.items(), module._buffers.items())
    ]
    return cls, tuple(attributes), tuple(tensors), repr(list(module.children()))


class _Operators(TorchDispatchMode):
    """Operators that run inside, and the norms among them, of this package and of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.all: set[str] = set()
        self.ours: set[str] = set()
        self.theirs: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.all.add(func._schema.name.partition("::")[2])
        if "norm" in func._schema.name:
            (self.ours if func.namespace == "primitives" else self.theirs).add(func._schema.name)
        return func(*args, **(kwargs or {}))


def _near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    error = (actual.double() - expected.double()).abs().max()
    return bool(error <= tolerance * expected.double().abs().max())


def _channels(module: torch.nn.Module) -> tuple[int, ...]:
    """The sizes that a norm normalizes, or its channels."""
    for name in ("normalized_shape", "num_features", "num_channels"):
        if (value := getattr(module, name, None)) is not None:
            return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return next((tuple(p.shape) for p in own(module._parameters).values()), (24,))


def _shapes(sizes: tuple[int, ...], rows: int = 2) -> list[tuple[int, ...]]:
    """Shapes of inputs: with the channels last, and with channels first."""
    a, b, c = [n for n in (3, 5, 4, 6, 7, 2) if n not in sizes][:3]
    last = [(rows, *sizes), (rows, a, *sizes), (rows, a, b, *sizes), (rows, a, b, c, *sizes)]
    return last + ([(rows, *sizes, a), (rows, *sizes, a, b), (rows, *sizes, a, b, c)] if len(sizes) == 1 else [])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which the check leaves no trace for others."""
    state = torch.default_generator.get_state()
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", enabled=False):
            try:
                yield
            finally:
                torch.default_generator.set_state(state)


def _tried(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call, or its error."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # anything may come of what somebody wrote
        return error


def _served(module: torch.nn.Module, cls: type) -> bool:
    """Whether a module computes by norms of torch, all of which are served, with the same results."""
    runs, twins = [(torch.float64, shape) for shape in _shapes(_channels(module))], {}
    for dtype, shape in runs:
        if dtype not in twins:
            twins[dtype] = [Twin(module, cls, dtype) for _ in range(2)]
        for training in (False, True):
            x, operators = random(shape, 5).to(dtype), _Operators()
            theirs = _tried(twins[dtype][0], x, training=training)
            with override_except_dropout(), operators:
                ours = _tried(twins[dtype][1], x, training=training)
            if isinstance(theirs, Exception) or isinstance(ours, Exception):
                if type(theirs) is not type(ours):
                    return False
                continue
            states = [list(own(twin.module._buffers).values()) for twin in twins[dtype]]
            pairs = [(ours, theirs), *zip(*states[::-1], strict=True)]
            if operators.theirs or not operators.ours or not all(_near(a, b, _CLOSE[dtype]) for a, b in pairs):
                return False
            if torch.bfloat16 not in twins:
                # Another dtype says all that is left to say of a call that is served.
                twins[torch.bfloat16] = [Twin(module, cls, torch.bfloat16) for _ in range(2)]
                runs.append((torch.bfloat16, shape))
    return torch.bfloat16 in twins


def _relu_ranks(module: torch.nn.Module, cls: type) -> tuple[int, ...]:
    """Numbers of axes of inputs of which a module that is served makes a batch norm and a ReLU, with its state."""
    ranks: list[int] = []
    if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or not is_relu_alone(module):
        return ()
    # Changes of an attribute of its own go unseen.
    if vars(module).keys() - vars(torch.nn.BatchNorm1d(1)).keys() or _hidden(module, cls):
        return ()
    for shape in _shapes(_channels(module)):
        # A call that raises may have counted its batch.
        twins = [Twin(module, cls, torch.float64) for _ in range(2)]
        for training in (False, True):
            x, twins[1].module.training = random(shape, 5), training
            theirs = _tried(twins[0], x, training=training)
            ours = _tried(batch_normed, functional.batch_norm_relu, twins[1].module, x)
            if isinstance(ours, Exception):
                continue
            states = [list(own(twin.module._buffers).values()) for twin in twins]
            pairs = [(ours, theirs), *zip(*states, strict=True)]
            if not all(isinstance(a, torch.Tensor) and _near(a, b, _EXACT) for a, b in pairs):
                return ()
            ranks.append(len(shape))
    return tuple(dict.fromkeys(ranks))


def _forms(module: torch.nn.Module, argument: str) -> Iterator[Form]:
    """Every form that a module may have."""
    parts = tuple(name for name, _ in module.named_children())
    names = list(own(module._parameters))
    orders = list(itertools.permutations([*names, *[None] * (2 - len(names))])) if names else [(None, None)]
    for (scale, shift), eps in itertools.product(orders, epsilons(module)):
        if scale is None and shift is not None:
            continue
        for axis, centered, add_one in itertools.product((-1, 1), (False, True), (False, True)):
            if scale is not None or not add_one:
                yield Form(argument, scale, shift, eps, axis, centered, add_one, parts)


def _with_gradients(call: Any, variables: list[Tensor]) -> list[Tensor]:
    """A norm's result for the first of `variables`, and its gradients in all; nothing if it refuses such input."""
    y = _tried(call, variables[0])
    if isinstance(y, Exception) or y.shape != variables[0].shape:
        return []
    return [y, *torch.autograd.grad(y.sin().sum(), variables, materialize_grads=True)]


def _hidden(module: torch.nn.Module, cls: type) -> str:
    """The acts of a module that its results do not show, for the inputs of the check; empty if nothing."""
    for shape, training in itertools.product(_shapes(_channels(module)), (False, True)):
        twin, operators = Twin(module, cls, torch.float64), _Operators()
        state = vars(twin.module)
        # Parts follow the norm as they are.
        state.update(training=training, _modules={name: torch.nn.Identity() for name in state["_modules"]})
        before = {**state, **state["_buffers"]}
        x = random(shape, 5)
        with operators:
            y = _tried(twin, x, training=training)
        written = [name for name, value in {**state, **state["_buffers"]}.items() if value is not before.get(name)]
        if written:
            return f"its forward writes to its {written[0]}"
        others = [name for name in sorted(operators.all) if not _PLAIN.fullmatch(name)]
        if others and not isinstance(y, Exception):
            return f"it calls {others[0]}, which may do more for other inputs"
    return ""


def _truths(twin: Twin) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
    """Inputs and parameters, and what a module makes of them in either mode, for each shape that it takes."""
    (size,) = _channels(twin.module)
    for shape in _shapes((size,)):
        variables = [random(shape, 5).requires_grad_(), *twin.parameters()]
        with InFloat64():
            made = [_with_gradients(functools.partial(twin, training=mode), variables) for mode in (False, True)]
        if all(made):
            yield variables, made


def _agrees(form: Form, twin: Twin, variables: list[Tensor], truths: list[list[Tensor]]) -> bool:
    """Whether a form computes what a module does, with the same gradients, in float64."""
    rounding = Rounding(torch.float64, None, torch.float64, cast_first=False)
    found = _with_gradients(lambda x: computed(form, twin.module, x, rounding), variables)
    return bool(found) and all(_near(a, e, _EXACT) for truth in truths for a, e in zip(found, truth, strict=True))


def _rounding(form: Form, module: torch.nn.Module, cls: type, x: Tensor, parameters: torch.dtype) -> Rounding | None:
    """Where a module rounds for these dtypes; None if this package does not know the place."""
    twin = Twin(module, cls, parameters, 0.1)
    theirs = _tried(twin, x)
    if isinstance(theirs, Exception):
        return None
    with torch.autocast("cpu", torch.bfloat16):
        inside = _tried(twin, x)
    if isinstance(inside, Exception) or inside.dtype != theirs.dtype or not torch.equal(inside, theirs):
        return None
    for cast_first in (False, True) if x.dtype in _LOW else (False,):
        rounding = Rounding(x.dtype, parameters if form.scale else None, theirs.dtype, cast_first)
        ours = _tried(computed, form, twin.module, x, rounding)
        if isinstance(ours, Exception) or ours.dtype != theirs.dtype:
            continue
        # In float64 modules that compute in float32 leave digits away, which this package does not.
        tolerance = 0.0 if theirs.dtype in _LOW else _CLOSE[torch.float32] * theirs.abs().max()
        if ((ours - theirs).abs() <= tolerance).double().mean() > (_EQUAL if x.dtype in _LOW else 1.0 - 1e-9):
            return rounding
    return None


def _form(module: torch.nn.Module, cls: type, argument: str) -> Form | None:
    """The form of a norm that is composed of operations; None if it has none."""
    twin = Twin(module, cls, torch.float64, 0.1)
    truths = list(_truths(twin))
    for form in _forms(module, argument) if truths else ():
        if not all(_agrees(form, twin, *truth) for truth in truths):
            continue
        shapes = [variables[0].shape for variables, _ in truths]
        x = random((max(2, _ELEMENTS * shapes[0][0] // shapes[0].numel()), *shapes[0][1:]), 6)
        pairs = [*zip(_DTYPES, _DTYPES, strict=True), *[(dtype, torch.float32) for dtype in _LOW if form.scale]]
        roundings = [_rounding(form, module, cls, x.to(dtype), parameters) for dtype, parameters in pairs]
        found = tuple(rounding for rounding in roundings if rounding is not None)
        if found:
            constants = tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, _SIMPLE) and name not in OF_ANY_MODULE and name != form.eps
            )
            return form._replace(ranks=tuple({len(shape) for shape in shapes}), roundings=found, constants=constants)
    return None


def examined(module: torch.nn.Module, cls: type) -> Verdict:
    """The function that a module which looks like a norm computes, as far as this package can compute it.

    Args:
        module: A module, with a `forward` that somebody wrote.
        cls: Its class.
    """
    form = _obstacle(module)
    if not form:
        with _undisturbed():
            form = _tried(_examined, module, cls)
    if isinstance(form, tuple) or form == SERVED:
        return Verdict(form)
    reason = f"it could not be run: {form}" if isinstance(form, Exception) else form
    return Verdict(None, reason if _is_worth_a_word(module) else "")


def _examined(module: torch.nn.Module, cls: type) -> Form | tuple[int, ...] | str:
    """The form of a module, `SERVED`, or the reason why it has none."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    if len(required) == 1 and _served(module, cls):
        return _relu_ranks(module, cls) or SERVED
    if len(parameters) != 1:
        return "its forward takes more than the input"
    if len(_channels(module)) != 1:
        return "its parameters have more than one axis"
    form = _form(module, cls, parameters[0].name)
    return (form and _hidden(module, cls)) or form or "it computes no norm that this package has"
