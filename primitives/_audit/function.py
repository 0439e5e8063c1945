"""`audit`: run a function once, and say of each operation in it which nested derivatives torch gets right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from primitives._audit.nestings import described, nested_by_autograd, nestings
from primitives._audit.recording import Recorder, autograd_functions, labels_of, line_of_definition, places_by_module
from primitives._audit.report import AuditReport, Finding, grouped
from primitives._audit.strict import Call, culprits, errors_of
from primitives._audit.table import MAX_ORDER, tabled_version, verdict_of
from primitives._core.errors import LeafError, check_arguments, check_callable, remedy_noted
from primitives._core.trees.nodes import leaves_of_nodes, mapped_nodes
from primitives._repair.switch import is_repaired
from primitives._warm_up import tensors_kept
from primitives.func._reached import Reached
from primitives.tracing._modules.lending import attributes_kept

_REPAIR = "pr.repair_torch()"
_UNCUT = "let the derivative through there; bind what the function holds constant by functools.partial"
_CUSTOM = "pr.custom_op with rules that pr.testing.check_rules proves"


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

    The function runs once, as it is. Every operation that depends on an input or a parameter is looked up in a table,
    which compares torch's operators with central differences (`python -m perf.torch_derivatives`). This package's
    operations, and torch's that `repair_torch` serves while it is on, are right at every order. Parameters, buffers,
    gradients, attributes of the modules and random states come back as they were.

    A derivative that `function` takes itself counts: with a loss that holds a JVP, `order=1` is the gradient of that
    loss, and the operations of the JVP are listed like others. A loss that starts with `x.detach()` has no derivative
    in x: `audit(functools.partial(loss, x), ())` holds x constant.

    Args:
        function: A module or a function of tensors, modules and pytrees of them.
        args: Tuple of its positional arguments. The floating-point tensors among them and among the keyword arguments
            are differentiated, and the parameters of all modules that are given, or that the function reaches.
        kwargs: Its keyword arguments.
        order: Up to how many derivatives are nested, 1 to 3: 2 for a gradient through a JVP, a Hessian-vector product
            or a gradient penalty.
        strict: Whether to run the function in float64 too, and to compare each nesting with central differences along
            a random direction. A nesting that is wrong is traced to the innermost module that has it wrong. This takes
            some minutes where one call takes seconds; the logger `primitives.audit` tells its progress at level INFO.
            Where `torch.func` refuses the function, as for `requires_grad_` inside or an `autograd.Function` without
            `setup_context`, `torch.autograd` nests instead, and has no `jvp(jvp)`.
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
        [('aten.native_layer_norm.default', ('jvp(jvp)', 'vjp(jvp)', 'jacfwd(jacrev)', 'jacrev(jacrev)'))]
        >>> report.findings[0].remedy
        'pr.repair_torch()'
        >>> with pr.repair_torch():
        ...     bool(pr.audit(model, (torch.randn(2, 3),)))
        True
    """
    check_callable("audit", function)
    check_arguments("audit", "args", args)
    if order not in range(1, MAX_ORDER + 1):
        raise ValueError(f"audit: order must be between 1 and {MAX_ORDER}, got {order!r}.")
    given = mapped_nodes(_leaf, (args, dict(kwargs or {})), namespace)
    inputs = leaves_of_nodes(given, namespace)
    moving = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    reached = Reached([function, *(x for x in inputs if isinstance(x, torch.nn.Module))], lambda _: False)
    parameters = [x for x in reached.registered if isinstance(x, torch.nn.Parameter)]
    if not moving and not any(p.requires_grad for p in parameters):
        raise LeafError("audit: there must be a floating-point tensor or a parameter to differentiate, got none.")
    kept = attributes_kept(reached.owners), tensors_kept(list(reached.registered))
    with kept[0], kept[1], torch.random.fork_rng(), torch.enable_grad():
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
        findings, right, errors = *_looked_up(recorder, functions, order, strict), {}
        if not (findings or right or strict):
            findings = [Finding("nothing", (), (), dict(recorder.cuts), f"no operation was reached: {_UNCUT}")]
        if strict:
            again = mapped_nodes(_leaf, (args, dict(kwargs or {})), namespace)
            whole = Call(function, again[0], again[1], reached.modules)
            judge = functools.partial(errors_of, order=order, namespace=namespace)
            if any(map(_is_old, functions)) or _is_refused(functools.partial(judge, whole, order=1)):
                judge = functools.partial(judge, derivative=nested_by_autograd)
            errors = judge(whole)
            wrong = culprits(whole, errors, functools.partial(judge, is_inner=True), namespace)
            findings = _judged(findings, right, wrong, recorder.cuts, labels_of(function))
    return AuditReport(tuple(findings), right, order, tabled_version(), errors, is_repaired())


def _leaf(x: Any) -> Any:
    """A tensor as it is differentiated: its own values and strides, and no history."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    return x


def _looked_up(
    recorder: Recorder, functions: Mapping[Any, int], order: int, strict: bool
) -> tuple[list[Finding], dict[str, int]]:
    """The findings by the table and by the methods of `autograd.Function`s, and the calls of right operators."""
    findings, right = [], {}
    doubt = _CUSTOM if strict else f"try it with strict=True; {_CUSTOM}"
    for name, places in sorted(recorder.calls.items()):
        if found := _finding(name, dict(places), order, doubt):
            findings.append(found)
        else:
            right[name] = sum(places.values())
    for cls, count in functions.items():
        # One whose forward calls no operator is known by its class alone.
        places = recorder.applied.get(cls) or {f"{cls.__module__}.{cls.__qualname__}": count}
        findings.append(_finding_of_function(cls, dict(places), order, doubt))
    return findings, right


def _finding(name: str, places: dict[str, int], order: int, doubt: str) -> Finding | None:
    if name.startswith(("primitives.", "primitives_decompositions.")):
        return None
    verdict = verdict_of(name, order, repaired=is_repaired())
    wrong, raises = (
        tuple(described(n) for n in kind if len(n) <= order and "d" not in n) for kind in verdict or ((), ())
    )
    if verdict is not None and not (wrong or raises):
        return None
    repaired = verdict_of(name, order, repaired=True)
    if not is_repaired() and repaired is not None and not any(len(n) <= order for n in sum(repaired, ())):
        remedy = _REPAIR
    elif verdict is not None:
        remedy = "write it in other operations, or wrap it by pr.custom_op with rules of its own"
    else:
        # Views, factories, what torch never differentiates in its tests, or does not take in float64.
        remedy = doubt
    return Finding(name, wrong, raises, places, remedy)


def _is_refused(judge: Callable[..., Mapping[str, float | Exception]]) -> bool:
    """Whether `torch.func` raises for a reason that `torch.autograd` has not: the function takes gradients itself."""
    raised, by_autograd = (
        {str(e) for e in errors.values() if isinstance(e, RuntimeError)}
        for errors in (judge(), judge(derivative=nested_by_autograd))
    )
    return bool(raised) and raised.isdisjoint(by_autograd)


def _is_old(cls: Any) -> bool:
    """Whether it has no `setup_context`, without which `torch.func` refuses it."""
    return cls.setup_context is torch.autograd.Function.setup_context


def _finding_of_function(cls: Any, places: dict[str, int], order: int, doubt: str) -> Finding:
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
    remedy = f"{'write setup_context, without which torch.func refuses it; ' * _is_old(cls)}{doubt}"
    return Finding(f"autograd.Function {cls.__name__}", (), raises, places, remedy)


def _judged(
    findings: list[Finding], right: dict[str, int], wrong: Iterable[tuple[Call, Mapping[str, float | Exception]]],
    cuts: Iterable[str], label: Callable[[Any], str],
) -> list[Finding]:  # fmt: skip
    """The findings after `strict`, with one for each culprit whose errors none of them at its place explains.

    What is not known is right, and joins `right`, but for what a culprit calls.
    """
    blamed, named, suspected = [], set(), set()
    for call, failed in wrong:
        is_module = isinstance(call.target, torch.nn.Module)
        here = f"{label(call.target)}, " if is_module else ""
        at = [f for f in findings if any(place.startswith(here) for place in f.places)]
        known = {n for f in at for n in (*f.wrong, *f.raises)}
        errors = {n: e for n, e in failed.items() if described(n) not in known}
        doubtful = [f for f in at if f.remedy.endswith(_CUSTOM) or not (f.wrong or f.raises)]
        (named if errors else suspected).update(f.operation for f in doubtful)
        if not errors:
            continue
        named_function = getattr(call.target, "func", call.target)  # behind a functools.partial
        operation = f"module {here[:-2]}" if is_module else f"function {getattr(named_function, '__name__', '')}"
        wrong_ones, raising = (
            tuple(described(n) for n, e in errors.items() if isinstance(e, Exception) == raises)
            for raises in (False, True)
        )
        places = [*cuts, *[f"{place}: {f.operation}" for f in doubtful for place in f.places]]
        places = [p for p in places if p.startswith(here)] or [here + line_of_definition(named_function)]
        remedy, notes = f"correct it, or wrap it by {_CUSTOM}", tuple(grouped(errors))
        if any(f.remedy == _REPAIR for f in doubtful):
            remedy = _REPAIR
        elif cuts and not is_module:
            remedy = _UNCUT
        blamed.append(Finding(operation, wrong_ones, raising, dict.fromkeys(places, 1), remedy, notes))
    unknown = [f for f in findings if not (f.wrong or f.raises or f.operation in suspected)]
    right.update((f.operation, sum(f.places.values())) for f in unknown if f.operation not in named)
    return [f for f in findings if f not in unknown] + blamed
