"""The samples of torch's own operator and module tests (OpInfo, ModuleInfo), with this package in torch's place."""

import copy
import functools
import inspect
import io
import pkgutil

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves as leaves_of
from torch.utils._pytree import tree_map, tree_map_only

import primitives as pr
from tests.support import torchs_module, torchs_samples

# Names in torch's table, and the function's.
OPS = {
    "nn.functional.batch_norm": "batch_norm",
    "nn.functional.layer_norm": "layer_norm",
    "nn.functional.rms_norm": "rms_norm",
    "nn.functional.group_norm": "group_norm",
    "nn.functional.instance_norm": "instance_norm",
    "log_softmax": "log_softmax",
    "softmax": "softmax",
    "nn.functional.softmin": "softmin",
    "nn.functional.dropout": "dropout",
    "nn.functional.cross_entropy": "cross_entropy",
    "nn.functional.linear_cross_entropy": "linear_cross_entropy",
    "nn.functional.nll_loss": "nll_loss",
    "nn.functional.scaled_dot_product_attention": "scaled_dot_product_attention",
}
# Torch's options for chunks are its own.
VARIANTS = ("without_cudnn", "chunked", "chunked_none")
# Torch has no samples of these.
MODULES = [name for name in pr.nn.__all__ if hasattr(torch.nn, name) and name not in ("Dropout", "SyncBatchNorm")]
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def infos(names):
    """Torch's entries of functions: its table takes seconds to make, and not every process runs these tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if info.name in names and info.variant_test_name not in VARIANTS]


def samples(info):
    """For each sample: this package's function and torch's, the tensors that they differentiate, and their state."""
    name = OPS[info.name]
    for sample in torchs_samples(info, torch.float64):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        noise = kwargs.get("p", 0.5) if name == "dropout" and kwargs.get("training", True) else 0.0
        if 0.0 < kwargs.get("dropout_p", noise) < 1.0:
            continue  # The numbers drawn are not torch's.
        if "attn_mask" in kwargs:
            args, kwargs = (*args, kwargs["attn_mask"]), {k: v for k, v in kwargs.items() if k != "attn_mask"}
        if name in ("group_norm", "instance_norm"):
            bound = inspect.signature(getattr(F, name)).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, {}
        # Running statistics are state, which neither side differentiates in training.
        has_state = name in ("batch_norm", "instance_norm")
        state = {i: args[i].detach() for i in (1, 2) if has_state and args[i] is not None}
        tensors = {i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
        places = sorted(tensors - state.keys())

        def call(space, *tensors, state, args=args, kwargs=kwargs, places=places):
            given = {**{i: value.clone() for i, value in state.items()}, **dict(zip(places, tensors, strict=True))}
            return getattr(space, name)(*[given.get(i, arg) for i, arg in enumerate(args)], **kwargs)

        functions = [functools.partial(call, space, state=state) for space in (pr.functional, F)]
        yield *functions, tuple(args[i].detach().requires_grad_() for i in places), state


# Torch's attention has second derivatives and tangents by its formula alone; this package's kernels are their own.
@sdpa_kernel(SDPBackend.MATH)
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", OPS)
def test_op_samples(name):
    found = [each for info in infos([name]) for each in enumerate(samples(info))]
    if not found:
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    for i, (ours, theirs, tensors, state) in found:
        results = ours(*tensors), theirs(*tensors)
        # Attention has rows beside one another, head after head, as torch's own kernels but not as its formula.
        assert_close(*results, check_stride="attention" not in name)
        cotangent = torch.randn_like(results[1])
        assert_close(*[torch.autograd.grad(y, tensors, cotangent) for y in results])
        primals = tuple(t.detach() for t in tensors)
        tangents = tuple(torch.randn_like(t) for t in primals)
        assert_close(*[torch.func.jvp(f, primals, tangents) for f in (ours, theirs)])
        with pr.repair_torch():
            assert_close(theirs(*primals), results[1], check_stride=False)
        points = [(primals, state), (tuple(2 * t for t in primals), state)]
        several = torch.func.vmap(lambda primals, state, f=ours: f(*primals, state=state))
        together = several(*tree_map(lambda *values: torch.stack(values), *points))
        assert_close(together, torch.stack([theirs(*values, state=state) for values, state in points]))
        # Samples differ in what surrounds the operator, whose second order the records hold to the definition.
        if i % (8 if "linear" in name else 4):
            continue
        options = {"fast_mode": True, "check_batched_grad": True}
        torch.autograd.gradgradcheck(ours, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, **options)


def test_op_errors():
    cases = [(info, case) for info in infos(OPS) if info.error_inputs_func for case in info.error_inputs("cpu")]
    assert len(cases) > 5
    for info, case in cases:
        sample = case.sample_input
        if info.name == "nn.functional.group_norm" and not sample.input.numel():
            continue  # Torch takes groups of nothing before 2.15, as this package does.
        with pytest.raises(case.error_type):
            getattr(pr.functional, OPS[info.name])(sample.input, *sample.args, **sample.kwargs)


def modules(name, dtype, training):
    """For each input of torch's: a module of this package, torch's with the same state, and the arguments."""
    torch.manual_seed(0)
    info = torchs_module(name)
    found = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
    turn = 2 * (dtype is torch.float64) + training
    for i, given in enumerate(found):
        # Where there are dozens, which differ by a few options, dtypes and modes meet them in turns.
        if len(found) > 30 and (i + i // 4 + i // 16) % 4 != turn:
            continue
        args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
        theirs = info.module_cls(*args, **kwargs).to(dtype).train(training)
        for value in theirs.parameters():
            torch.nn.init.uniform_(value, -0.5, 0.5)
        ours = getattr(pr.nn, info.module_cls.__name__)(*args, **kwargs).to(dtype).train(training)
        ours.load_state_dict(theirs.state_dict())
        yield ours, theirs, given.forward_input.args, given.forward_input.kwargs


def step(module, args, kwargs, *, order=1):
    """Outputs and gradients, with `order` 2 those of the gradients too, and the state."""
    args = [x.detach().requires_grad_() if x.is_floating_point() else x for x in args]
    variables = [*(x for x in args if x.requires_grad), *module.parameters()]
    outputs = [y for y in leaves_of(module(*args, **kwargs)) if y is not None]
    results, values = [], outputs
    for _ in range(order):
        # The sine of a large number would show its last digits.
        loss = sum((y / max(1.0, y.abs().max().item() if y.numel() else 0.0)).sin().sum() for y in values)
        values = torch.autograd.grad(loss, variables, create_graph=order > 1, materialize_grads=True)
        results.append(values)
    return outputs, values[0].stride(), [y.stride() for y in outputs], results, dict(module.state_dict())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODULES)
@sdpa_kernel(SDPBackend.MATH)
def test_module_samples(name, dtype, training):
    """A step; where there is state, behind two steps of training."""
    info, order = torchs_module(name), 1 + (dtype is torch.float64)
    # The mean over labels that are ignored, all of them.
    options = {"equal_nan": info.module_cls is torch.nn.CrossEntropyLoss}
    for ours, theirs, (x, *args), kwargs in modules(name, dtype, training):
        for layout in LAYOUTS if info.module_memformat_affects_out else LAYOUTS[:1]:
            if layout is torch.contiguous_format or x.dim() == {torch.channels_last: 4}.get(layout, 5):
                pair = copy.deepcopy((ours, theirs))
                for number, mode in enumerate([True, True, training] if [*ours.buffers()] else [training], 1):
                    given = [(number * x.detach()).to(memory_format=layout), *args]
                    steps = [step(module.train(mode), given, kwargs, order=order) for module in pair]
                    assert_close(*steps, **options)


@pytest.mark.parametrize("name", MODULES)
def test_modules_go_through_files_and_devices(name):
    for ours, theirs, args, kwargs in modules(name, torch.float32, training=True):
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        # The user allows the classes of torch itself that a file holds.
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        assert not [name for name in foreign if not name.startswith("torch.")]
        file.seek(0)
        with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in foreign]):
            loaded = torch.load(file)
        assert_close(step(loaded, args, kwargs), step(copy.deepcopy(ours), args, kwargs))
        assert pr.nn.converted(loaded).keys() == pr.nn.converted(ours).keys()
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        expected = theirs(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        actual = copy.deepcopy(ours).to("meta")(*args, **kwargs)
        for y, want in zip(leaves_of(actual), leaves_of(expected), strict=True):
            assert y is want is None or (y.shape, y.device.type) == (want.shape, "meta")
