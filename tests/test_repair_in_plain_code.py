"""Plain code under `repair_torch`: values and first gradients are torch's, bit for bit."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import primitives as pr
from perf.operator_calls import Recorder
from primitives._audit.nestings import nested, perturbed_sum
from primitives._repair.kernels import repairs
from tests.support import randn, torchs_samples


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


def _numbers(x):
    """Those of a tensor, NaN among them comparable; there is no `nan_to_num` of complex numbers of half precision."""
    x = x.to_dense()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).nan_to_num()


def _same(left, right):
    if isinstance(left, type) or isinstance(right, type):
        return left == right
    return len(left) == len(right) and all(
        a.shape == b.shape
        and (a.layout is not torch.strided or a.stride() == b.stride())
        and torch.equal(_numbers(a), _numbers(b))
        for a, b in zip(left, right, strict=True)
    )


def _named(ops):
    """Parameters of a test; memory that nobody has written has no values to compare."""
    return [pytest.param(op, id=f"{op.name} {op.variant_test_name}".strip()) for op in ops if "empty" not in op.name]


# Of the others the first gradient can be wrong in torch.
FUNCTIONS = [op for op in op_db if op.name not in ("cholesky_inverse", "cholesky_solve")]
REPAIRED = {name.partition("::")[2].partition(".")[0].strip("_") for name in repairs()}


def _is_near(op):
    """Whether a function of torch is by its name one that is repaired."""
    words = op.name.replace(".", "_")
    return any(name in words or words.endswith(name) for name in REPAIRED) or "norm" in words or "attention" in words


# Torch's own, of what is deprecated or slow: one of them comes first.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "op, count",
    [
        *(pytest.param(*near.values, 6, id=near.id) for near in _named(filter(_is_near, FUNCTIONS))),
        *(
            pytest.param(*each.values, 12, id=f"{each.id}, more", marks=pytest.mark.nightly)
            for each in _named(FUNCTIONS)
        ),
    ],
)
def test_plain_code_gives_values_and_gradients_of_torch_bit_for_bit(op, count):
    if torch.float32 not in op.supported_dtypes("cpu"):
        pytest.skip("no float32 on the CPU")
    samples = torchs_samples(op, torch.float32, requires_grad=op.supports_autograd)
    for sample in itertools.islice(samples, count):
        tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]

        def run(sample=sample):
            return op(sample.input, *sample.args, **sample.kwargs)

        expected = _results(run, tensors)
        with pr.repair_torch():
            assert _same(_results(run, tensors), expected), sample


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


WAITING = {name: repair for name, repair in repairs().items() if repair.waits_for and "CPU" in repair.devices}
BY_FORWARD_AD = {name for name, repair in WAITING.items() if repair.waits_for == "forward_ad"}
# Those that a transform in reverse mode alone has to find.
EARLY = {name for name, repair in WAITING.items() if repair.is_fused or repair.reverse == "node"}


def _is_registered(name):
    dump = torch._C._dispatch_dump(name).splitlines()
    return any(line.startswith("AutogradCPU: registered at") and "primitives" in line for line in dump)


def test_plain_code_meets_no_kernel_of_ours_for_operators_that_wait():
    # As a process finds it that has taken no transform.
    pr.repair_torch().undo()
    switch, x = pr.repair_torch(), torch.randn(4, 3, requires_grad=True)
    F.cross_entropy(F.batch_norm(F.layer_norm(x, (3,)), None, None, training=True), torch.arange(4) % 3).backward()
    assert not any(map(_is_registered, WAITING))
    torch.func.jvp(torch.sin, (x,), (x,))
    assert set(filter(_is_registered, WAITING)) == {*WAITING} - BY_FORWARD_AD
    assert {"aten::_softmax", "aten::_log_softmax", "aten::logsumexp"} <= BY_FORWARD_AD
    with forward_ad.dual_level():
        forward_ad.make_dual(x, x)
    assert all(map(_is_registered, WAITING))
    switch.undo()
    with forward_ad.dual_level(), pr.repair_torch():
        assert all(map(_is_registered, WAITING)), "a tangent may be there already"


# Torch's own, of what is deprecated or slow.
@pytest.mark.filterwarnings("ignore")
def test_each_function_that_calls_an_operator_that_waits_has_its_kernel_in_a_transform():
    torch.manual_seed(0)
    reached = set()
    for op in filter(_is_near, op_db):
        for sample in itertools.islice(torchs_samples(op, torch.float32), 12):
            seen = set()
            with contextlib.suppress(RuntimeError), Recorder(lambda func, *_, seen=seen: seen.add(func.name())):
                tree_leaves(op(sample.input, *sample.args, **sample.kwargs))[0].sum().backward()
            if not seen & EARLY:
                continue
            pr.repair_torch().undo()

            def call(x, op=op, sample=sample):
                return tree_leaves(op(x, *sample.args, **sample.kwargs))[0].sum()

            with pr.repair_torch(), contextlib.suppress(RuntimeError):
                torch.func.grad(call)(sample.input.detach())
            assert _is_registered("aten::native_layer_norm"), op.name
            reached |= seen & EARLY
            break
    assert len(reached) > 6, reached
    pr.repair_torch().undo()
    with pr.repair_torch():
        args = *[None] * 4, True, 0.1, 1e-5, False
        torch.func.grad(lambda x: torch._batch_norm_impl_index(x, *args)[0].sum())(torch.randn(4, 3))
    assert _is_registered("aten::native_layer_norm")


def test_third_derivatives_find_the_eps_that_torch_does_not_hand_on():
    scale = torch.logspace(-4, 4, 5, dtype=torch.float64)[:, None]
    x, v = randn(5, 6) * scale, randn(5, 6) * scale

    def f(x):
        return perturbed_sum([F.layer_norm(x, (6,), eps=1e-5)])

    def by_autograd(x):
        h = f(x.requires_grad_())
        for _ in range(3):
            (gradient,) = torch.autograd.grad(h, x, create_graph=True)
            h = (gradient * v.to(x.dtype)).sum()
        return torch.autograd.grad(h, x)[0]

    with pr.repair_torch():
        truth = torch.func.grad(nested(f, [v], "rrr"))(x)
        torch.testing.assert_close(
            by_autograd(x.clone()) / truth.norm(dim=1, keepdim=True), truth / truth.norm(dim=1, keepdim=True)
        )
        error = (by_autograd(x.float()) - truth).norm(dim=1) / truth.norm(dim=1)
        known = (torch.func.grad(nested(f, [v.float()], "rrr"))(x.float()) - truth).norm(dim=1) / truth.norm(dim=1)
        assert (error < 4 * known.max()).all(), (error, known)
        x[1, 2] = torch.nan
        assert by_autograd(x).isnan().any(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("f", [lambda x: torch.pow(x, x), torch.linalg.det, lambda x: torch.logcumsumexp(x, 0)])
def test_a_formula_unpacks_nothing_a_second_time(f):
    x, counts = (randn(3, 3).square() + torch.eye(3)).requires_grad_(), []

    def second(f):
        (gradient,) = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    with pr.repair_torch():
        again = second(lambda x: checkpoint(f, x, use_reentrant=False))
        torch.testing.assert_close(again, second(f), rtol=1e-12, atol=1e-12)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda t: counts.append(id(t)) or t):
            y = f(x)
        for create_graph in (False, True):
            torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create_graph)
    assert {*map(counts.count, counts)} == {2}  # once in each backward pass
    assert not y.grad_fn.metadata


@pytest.mark.filterwarnings("ignore")  # those of Dynamo
@pytest.mark.parametrize("f", [lambda x: torch.pow(x, x), torch.cholesky_inverse])
def test_a_compiled_backward_pass_runs_behind_an_eager_forward_pass(f):
    x = (randn(3, 3).square() + torch.eye(3)).requires_grad_()
    with pr.repair_torch():
        (expected,) = torch.autograd.grad(f(x).sum(), x)
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda loss: loss.backward(), backend="aot_eager")(f(x).sum())
    torch.testing.assert_close(x.grad, expected)
