"""`audit`: run a function once, and say of each operation in it which nested derivatives torch gets right."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from primitives._audit.nestings import (
    InFloat64,
    described,
    difference,
    nested,
    nested_by_autograd,
    nestings,
    perturbed_sum,
)
from primitives._audit.recording import Recorder, autograd_functions, places_by_module
from primitives._audit.report import AuditReport, Finding
from primitives._audit.table import MAX_ORDER, remedy_for, tabled_version, verdict_of
from primitives._core.errors import LeafError, check_callable, remedy_noted
from primitives._core.trees.nodes import leaves_of_nodes, mapped_nodes
from primitives._warm_up import tensors_kept
from primitives.tracing._modules.lending import attributes_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["audit"]

# Of a whole function in float64 against central differences, relative to the derivative.
TOLERANCE = 1e-5
# Smaller ones where larger ones cross kinks, of which a network with ReLU has many.
_STEPS = (1e-4, 1e-6, 1e-8)

_UNKNOWN = "try it with strict=True"
_CUSTOM = "primitives.custom_op with rules of its own, and testing.check_rules"


def audit(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    order: int = 2,
    strict: bool = False,
    namespace: str = "",
) -> AuditReport:
    """Say which derivatives of a function torch gets right, operation by operation, and what to do about the others.

    The function runs once, as it is; every operation that depends on an input or a parameter is looked up in a table of
    torch's operators, measured against central differences (`python -m perf.torch_derivatives`). An operation of
    this package is right at every order. These come back as they were: parameters, buffers, gradients, attributes of
    the modules, random states.

    The table was measured in float64 on a CPU, over the samples of torch's own tests, along random directions: where it
    says right, none of those was wrong. A derivative that `function` takes itself counts: of a loss with a JVP in it,
    `order=1` is the gradient of that loss, and the operations of the JVP are listed like others.

    Args:
        function: A module or a function of tensors and pytrees of them.
        args: Tuple of its positional arguments. The floating-point tensors among them and among the keyword arguments
            are differentiated, and the parameters of a module.
        kwargs: Its keyword arguments.
        order: Up to how many derivatives are nested, 1 to 3: 2 for a gradient through a JVP, a Hessian-vector product
            or a gradient penalty.
        strict: Whether the function is also run in float64 and each nesting held against central differences along
            a random direction. It takes some minutes where one call takes seconds, and says whether operations that
            the table lacks, and `autograd.Function`s, are right. With a function that has no `setup_context`, which
            `torch.func` refuses, the nestings are those of `torch.autograd`, which has no `jvp(jvp)`.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        An `AuditReport`: true if nothing was found, and a text that says what was.

    Raises:
        TypeError: If `args` is not a tuple.
        ValueError: If `order` is not 1, 2 or 3.
        LeafError: If there is nothing to differentiate.
        Exception: As the function raises it, with a note of the remedy where torch lacks a derivative.

    Example:
        >>> import torch, primitives as pr
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
        >>> report = pr.audit(model, (torch.randn(2, 3),))
        >>> [(finding.operation, finding.wrong) for finding in report.findings]
        [('aten.native_layer_norm.default', ('jvp(jvp)', 'vjp(jvp)'))]
        >>> report.findings[0].remedy
        'nn.convert or override_torch'
        >>> bool(pr.audit(pr.nn.convert(model), (torch.randn(2, 3),)))
        True
    """
    check_callable("audit", function)
    if not isinstance(args, tuple):
        raise TypeError(f"audit: args must be the tuple of the positional arguments, got {type(args).__name__}.")
    if order not in range(1, MAX_ORDER + 1):
        raise ValueError(f"audit: order must be between 1 and {MAX_ORDER}, got {order!r}.")
    modules = list(function.modules()) if isinstance(function, torch.nn.Module) else []
    parameters = list(modules[0].parameters()) if modules else []
    buffers = list(modules[0].buffers()) if modules else []
    given = mapped_nodes(_leaf, (args, dict(kwargs or {})), namespace)
    moving = [x for x in leaves_of_nodes(given, namespace) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not moving and not any(p.requires_grad for p in parameters):
        raise LeafError("audit: there must be a floating-point tensor or a parameter to differentiate, got none.")
    # The run may leave tensors with a history in the module, which cannot be copied.
    twin = copy.deepcopy(function) if strict and modules else function
    with attributes_kept(modules), tensors_kept([*parameters, *buffers]), torch.random.fork_rng(), torch.enable_grad():
        with (
            places_by_module(function) as running,
            Recorder([*moving, *parameters], running) as recorder,
            remedy_noted(),
        ):
            outputs = function(*given[0], **given[1])
        results = [y for y in leaves_of_nodes(outputs, namespace) if isinstance(y, torch.Tensor)]
        if strict and not any(y.is_floating_point() for y in results):
            raise LeafError("audit: strict=True needs a floating-point result to differentiate, got none.")
        functions = autograd_functions(results)
        derivative = nested_by_autograd if any(map(_is_old, functions)) else nested
        errors = _errors(twin, args, dict(kwargs or {}), order, namespace, derivative) if strict else {}
    findings, right = [], {}
    for name, places in sorted(recorder.calls.items()):
        finding = _finding(name, dict(places), order)
        if finding is None:
            right[name] = places.total() if hasattr(places, "total") else sum(places.values())
        else:
            findings.append(finding)
    for cls, count in functions.items():
        # One whose forward calls no operator is known by its class alone.
        places = recorder.applied.get(cls) or {f"{cls.__module__}.{cls.__qualname__}": count}
        findings.append(_finding_of_function(cls, dict(places), order))
    report = AuditReport(tuple(findings), right, order, tabled_version(), errors, TOLERANCE)
    if strict and not report.failed:
        # The differences know what the table does not.
        settled = {f.operation: sum(f.places.values()) for f in findings if not (f.wrong or f.raises)}
        findings = tuple(f for f in findings if f.operation not in settled)
        report = dataclasses.replace(report, findings=findings, right={**right, **settled})
    return report


def _leaf(x: Any) -> Any:
    """A tensor as it is differentiated: its own values and strides, and no history."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    return x


def _finding(name: str, places: dict[str, int], order: int) -> Finding | None:
    """The finding for an operator; None if it is right."""
    namespace = name.partition(".")[0]
    if namespace == "primitives":
        return None
    verdict = verdict_of(name)
    if verdict is None:
        # Views, factories, what torch never differentiates in its tests, or does not take in float64.
        is_torchs = namespace in {"aten", "prims"}
        return Finding(name, (), (), places, remedy_for(name, _UNKNOWN) if is_torchs else f"{_UNKNOWN}; {_CUSTOM}")
    wrong, raises = (tuple(described(n) for n in kind if len(n) <= order) for kind in verdict)
    return Finding(name, wrong, raises, places, remedy_for(name)) if wrong or raises else None


def _is_old(cls: Any) -> bool:
    """Whether it has no `setup_context`, without which `torch.func` refuses it."""
    return cls.setup_context is torch.autograd.Function.setup_context


def _finding_of_function(cls: Any, places: dict[str, int], order: int) -> Finding:
    """The finding for an `autograd.Function`, by the methods that it defines."""
    # The decorator puts a function of its own in the place of the backward.
    is_once = cls.backward.__code__.co_filename == torch.autograd.function.__file__
    has_jvp = cls.jvp is not torch.autograd.Function.jvp
    lacking = [
        n
        for k in range(1, order + 1)
        for n in nestings(k)
        if ("f" in n and not has_jvp) or (is_once and n[1:]) or (_is_old(cls) and "ff" in n)
    ]
    raises = tuple(map(described, lacking))
    remedy = f"{'write setup_context, without which torch.func refuses it; ' * _is_old(cls)}{_UNKNOWN}; {_CUSTOM}"
    return Finding(f"autograd.Function {cls.__name__}", (), raises, places, remedy)


def _settled(function: Any, directions: list[Tensor], xs: list[Tensor]) -> float:
    """The derivative along `directions` by the central differences that agree best with those of half their step."""
    found = []
    for step in _STEPS:
        wide, narrow = (difference(function, directions, h)(*xs).item() for h in (step, step / 2))
        gap = abs(wide - narrow) / max(abs(narrow), 1e-3)
        # Steps that leave the domain of the function say nothing.
        found.append((gap if math.isfinite(gap) else math.inf, narrow))
        if gap < TOLERANCE / 100:
            break
    return min(found)[1]


def _errors(
    function: Any, args: Any, kwargs: Any, order: int, namespace: str, derivative: Callable[..., Any]
) -> dict[str, float | Exception]:
    """Error of each nesting, by `derivative`, of the function in float64 against central differences, or its error.

    A module is the audit's own, and becomes one of float64.
    """
    names: list[str] = []
    parameters: list[Tensor] = []
    modules: list[torch.nn.Module] = []
    if isinstance(function, torch.nn.Module):
        modules = list(function.double().modules())
        names = [name for name, p in function.named_parameters() if p.requires_grad]
        parameters = [p.detach() for p in function.parameters() if p.requires_grad]
    leaves = leaves_of_nodes((args, kwargs), namespace)
    wide = [x.detach().double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
    positions = [n for n, x in enumerate(wide) if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def scalar(*xs: Tensor) -> Tensor:
        values = list(wide)
        for position, x in zip(positions, xs, strict=False):
            values[position] = x
        remaining = iter(values)
        moved_args, keywords = mapped_nodes(lambda _: next(remaining), (args, kwargs), namespace)
        # Code that draws numbers draws the same ones each time.
        torch.manual_seed(0)
        with attributes_kept(modules), InFloat64(half=True):
            if names:
                moved = dict(zip(names, xs[len(positions) :], strict=True))
                buffers = {name: b.clone() for name, b in function.named_buffers()}
                outputs = torch.func.functional_call(
                    function, {**moved, **buffers}, moved_args, keywords, tie_weights=True
                )
            else:
                outputs = function(*moved_args, **keywords)
        results = [y for y in leaves_of_nodes(outputs, namespace) if isinstance(y, torch.Tensor)]
        return perturbed_sum([y for y in results if y.is_floating_point()])

    xs = [*[wide[n] for n in positions], *parameters]
    generator = torch.Generator().manual_seed(0)
    # Steps are shares of each number, so that they are neither lost in large ones nor larger than small ones.
    directions = [
        torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device) * torch.where(x == 0, 1.0, x.abs())
        for x in xs
    ]
    below, errors = scalar, {}
    for level in range(1, order + 1):
        truth = _settled(below, directions, xs)
        for nesting in nestings(level):
            try:
                found = derivative(scalar, directions, nesting)(*xs).item()
                errors[nesting] = abs(found - truth) / max(abs(truth), 1e-3)
            except Exception as error:
                errors[nesting] = error
        right = [n for n in nestings(level) if not isinstance(errors[n], Exception) and errors[n] <= TOLERANCE]
        below = derivative(scalar, directions, right[0]) if right else difference(below, directions, 1e-3)
    return errors
