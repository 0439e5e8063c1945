"""Where source code fixes a number that the launch planner is to decide."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Options of a launch, wherever they stand.
OPTIONS = re.compile(r"num_(warps|stages|ctas)|waves_per_eu|maxnreg", re.ASCII)
# And sizes of tiles and numbers of programs, in launchers and kernels.
POLICY = re.compile(
    rf"_?({OPTIONS.pattern}|num_splits|\w+_(warps|stages|splits)|\w*_STAGES|BLOCK\w*|SPLIT\w*"
    r"|block_(rows|cols|channels|samples|spatial|splits|parts|size)\w*)",
    re.ASCII,
)
# Calls whose arguments are sizes of tiles.
TILES = re.compile(r"(tl\.)?(arange|zeros|full)", re.ASCII)
_LITERAL = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Name, ast.operator, ast.unaryop, ast.expr_context)


def _literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Integers other than 0 and 1 in an expression; indices are none."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value not in (0, 1):
            yield node
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.Subscript) and child is node.slice):
            yield from _literals(child)


def named_numbers(source: ast.AST) -> set[str]:
    """Names to which the source gives an integer other than 0 and 1, or a formula of such integers."""
    found: set[str] = set()
    for node in ast.walk(source):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.value is None:
            continue
        parts = list(ast.walk(node.value))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        if (
            all(isinstance(part, _LITERAL) for part in parts)
            and names <= found
            and (names or any(_literals(node.value)))
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _name_of(target: ast.AST | None) -> str | None:
    """What a place is called: a variable, an attribute, or the key of an item."""
    if isinstance(target, ast.Subscript):
        target = target.slice
    value = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}.get(type(target))
    name = None if value is None else getattr(target, value)
    return name if isinstance(name, str) else None


def _assigned(target: ast.AST, value: ast.expr) -> Iterator[tuple[str | None, ast.expr]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield _name_of(target), value
        return
    values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    for number, element in enumerate(target.elts):
        yield from _assigned(element, values[number] if len(values) == len(target.elts) else value)


def _given_names(node: ast.AST) -> Iterator[tuple[str | None, ast.expr]]:
    """Values, each with the name that the node gives it."""
    if isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords)
        # As in `options.setdefault("num_warps", 4)`.
        yield from (
            (_name_of(node.args[0]), argument) for argument in node.args[1:] if isinstance(node.args[0], ast.Constant)
        )
    elif isinstance(node, ast.Dict):
        yield from ((_name_of(key), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield _name_of(node.target), node.value
    elif isinstance(node, ast.arguments):
        named = [*node.posonlyargs, *node.args]
        yield from ((a.arg, d) for a, d in zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True))
        yield from ((a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None)
    elif isinstance(node, ast.FunctionDef):
        # Of several numbers, the name says nothing of each.
        returned = (part.value for part in ast.walk(node) if isinstance(part, ast.Return))
        yield from ((node.name, value) for value in returned if value and not isinstance(value, ast.Tuple))


def fixed_launch_numbers(
    source: ast.AST, constants: Collection[str] = (), policy: re.Pattern[str] = POLICY
) -> list[tuple[int, str]]:
    """Lines that fix a launch parameter to a number other than 0 and 1, or take it from one, and the expressions.

    Args:
        source: A module.
        constants: Names of numbers that other modules define.
        policy: What launch parameters are called.
    """
    known = {*constants, *named_numbers(source)}
    found = set()

    def is_fixed(value: ast.AST) -> bool:
        return any(_literals(value)) or any(isinstance(n, ast.Name) and n.id in known for n in ast.walk(value))

    for node in ast.walk(source):
        for name, value in _given_names(node):
            if name is not None and policy.fullmatch(name) and is_fixed(value):
                found.add((value.lineno, ast.unparse(value)))
        if policy is POLICY and isinstance(node, ast.Call) and TILES.fullmatch(ast.unparse(node.func)):
            sizes = node.args[:2] if ast.unparse(node.func).endswith("arange") else node.args[:1]
            # A part of a block is as large as the plan makes it.
            parts = [s.left if isinstance(s, ast.BinOp) and isinstance(s.op, ast.FloorDiv) else s for s in sizes]
            found |= {(part.lineno, ast.unparse(part)) for part in parts if is_fixed(part)}
    return sorted(found)
