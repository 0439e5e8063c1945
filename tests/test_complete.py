"""An operation that lacks a part fails here, with a sentence for each part that says what to write and where."""

import inspect
import pathlib
import re

import pytest

import primitives as pr
from perf import support
from perf.ops import CASES, record
from primitives.__main__ import TOLERANCE, self_check
from primitives._core import registered_primitives

ROOT = pathlib.Path(pr.__file__).resolve().parent.parent
OPERATIONS = (ROOT / "docs/reference/operations.md").read_text(encoding="utf-8")


def lacking(case):
    """A sentence for each part that an op does not have yet."""
    public = case.public
    # As prose has it: layer norm, log-softmax.
    words = public.replace("_", "[ _-]")
    parts = {
        f"the function {public} with its checks, offered by primitives/functional.py": hasattr(pr.functional, public),
        f"a section on its formulas and edge cases, in docs/reference/operations.md: {public}": re.search(
            rf"^## {words}", OPERATIONS, re.MULTILINE | re.IGNORECASE
        ),
        f"lines for a gpu, which the bench measures, in perf/ops/workloads.csv: {case.name}": case.workloads("gpu"),
        f"small lines, with which kernels are checked, in perf/ops/workloads.csv: {case.name}": case.workloads("small"),
    }
    return [f"{case.name}: write {part}." for part, there in parts.items() if not there]


# Other arguments of a function do not make another operation.
WITH_A_FUNCTION = [case for case in CASES if not case.family or case.public != record.RECORDS[case.family].public]


@pytest.mark.parametrize("case", WITH_A_FUNCTION, ids=lambda case: case.name)
def test_operations_have_every_part(case):
    assert not (found := lacking(case)), "\n".join(found)


def unrecorded(primitives):
    """A sentence for each primitive whose op has no record."""
    known = {case.family or case.name for case in CASES}
    for name, op in primitives.items():
        stem = re.sub("(_double_backward)?(_bwd|_fwd)?(_jvp)?$", "", op.name)
        # Random bits are state, without a derivative.
        if name.startswith("primitives::") and stem not in known and op.spec.differentiable_outputs:
            yield f"{op.name}: write a record of {stem}, perf/ops/{stem}.py, and name it in perf/ops/__init__.py."


def test_primitives_have_a_record():
    assert not (found := [*unrecorded(registered_primitives())]), "\n".join(found)


OURS = {name: op for name, op in registered_primitives().items() if name.startswith("primitives::")}


@pytest.mark.parametrize("name", OURS)
def test_primitives_are_complete(name):
    op = OURS[name]
    assert "cuda" in op.rules.kernels, "write bind_kernels"
    assert op.has_rule("vmap"), "write def_axes: vmap and DTensor follow from the axes of its tensors"
    assert op.has_rule("axes") or not op.spec.differentiable_outputs, "write def_axes"
    assert {"mean", "rstd"}.intersection(op.spec.outputs) <= {*op.spec.statistics}
    is_differentiated = (op.has_rule("vjp") and op.has_rule("jvp")) or op.rules.decomposable
    assert is_differentiated, "write its rules of second order in a file beside it, or say decomposable=True"
    # One that is made, of formulas or of other operators, hands on what it does not look at.
    *named, last = inspect.signature(op.rule("reference")).parameters
    assert last in ("args", op.spec.arguments[-1])
    assert tuple(named) == (op.spec.arguments[: len(named)] if last == "args" else op.spec.arguments[:-1])


def rooms(op):
    """Folders of the file of an operation, and of all functions that are its rules."""
    stem = re.sub("(_double_backward)?(_bwd|_fwd)?(_jvp)?$", "", op.name)
    yield from (path.parent.name for path in (ROOT / "primitives" / "ops").glob(f"*/{stem}.py"))
    for rule in (*op.rules.given.values(), *op.rules.kernels.values()):
        own = re.match(r"primitives\.ops\.(\w+)\.", rule.__module__)
        yield from [own[1]] if own else []


@pytest.mark.parametrize("name", OURS)
def test_one_family_one_folder(name):
    assert len({*rooms(OURS[name])}) == 1, "operation and rules lie in one folder of primitives/ops, and in no other"


def test_the_self_check_finds_every_function_right():
    for name, errors in self_check("cpu"):
        assert max(errors.values()) < TOLERANCE, (name, errors)


def test_the_page_of_support_is_written():
    assert support.page() == support.PAGE.read_text(encoding="utf-8"), "run: python -m perf.support"
