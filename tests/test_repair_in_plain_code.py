"""Plain code under `repair_torch`: values and first gradients are torch's, bit for bit."""

import copy
import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves

import primitives as pr
from primitives._repair.kernels import repairs


def _results(function, tensors):
    """Outputs and gradients, or the type of what was raised."""
    torch.manual_seed(0)
    try:
        outputs = [y for y in tree_leaves(function()) if isinstance(y, torch.Tensor)]
        moving = [y for y in outputs if y.requires_grad]
        cotangents = [torch.ones_like(y) for y in moving]
        wanted = [x for x in tensors if x.requires_grad]
        gradients = torch.autograd.grad(moving, wanted, cotangents, allow_unused=True) if moving and wanted else []
        return [*(y.detach() for y in outputs), *(g for g in gradients if g is not None)]
    except Exception as error:
        return type(error)


def _same(left, right):
    if isinstance(left, type) or isinstance(right, type):
        return left == right
    return len(left) == len(right) and all(
        a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(left, right, strict=True)
    )


def _named(ops):
    return [pytest.param(op, id=f"{op.name} {op.variant_test_name}".strip()) for op in ops]


# Their first gradient can be wrong in torch.
WRONG_AT_ONCE = ("cholesky_inverse", "cholesky_solve")
REPAIRED = {name.partition("::")[2].partition(".")[0].strip("_") for name in repairs()}


def _is_near(op):
    """Whether a function of torch is by its name one that is repaired."""
    words = op.name.replace(".", "_")
    return any(name in words or words.endswith(name) for name in REPAIRED) or "norm" in words or "attention" in words


# Torch's own, of what is deprecated or slow: one of them comes first.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", _named(op for op in op_db if _is_near(op) and op.name not in WRONG_AT_ONCE))
def test_plain_code_gives_values_and_gradients_of_torch_bit_for_bit(op):
    if torch.float32 not in op.supported_dtypes("cpu"):
        pytest.skip("no float32 on the CPU")
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, 12):
        tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]

        def run(sample=sample):
            return op(sample.input, *sample.args, **sample.kwargs)

        expected = _results(run, tensors)
        with pr.repair_torch():
            assert _same(_results(run, tensors), expected), sample


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", _named(op for op in op_db if op.name not in WRONG_AT_ONCE))
def test_all_functions_of_torch_are_the_same_in_plain_code(op):
    test_plain_code_gives_values_and_gradients_of_torch_bit_for_bit(op)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [pytest.param(info, id=info.name) for info in module_db])
def test_modules_of_torch_are_the_same_in_plain_code(info):
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    for made, call in [(each.constructor_input, each.forward_input) for each in inputs[:3] if each.forward_input]:
        torch.manual_seed(0)
        module = info.module_cls(*made.args, **made.kwargs)
        given = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor)]

        def results(module, call=call, given=given):
            return _results(lambda: module(*call.args, **call.kwargs), [*module.parameters(), *given])

        twin = copy.deepcopy(module)
        expected = results(module)
        with pr.repair_torch():
            assert _same(results(twin), expected)
