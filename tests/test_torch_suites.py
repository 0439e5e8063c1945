"""The samples of torch's own operator and module tests (OpInfo, ModuleInfo), with this package in torch's place."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import primitives as pr

# Names in torch's table, and the function's.
OPS = {
    "nn.functional.batch_norm": "batch_norm",
    "nn.functional.layer_norm": "layer_norm",
    "log_softmax": "log_softmax",
    "nn.functional.dropout": "dropout",
}
INFOS = [info for info in op_db if info.name in OPS and info.variant_test_name != "without_cudnn"]
MODULES = [info for info in module_db if info.module_cls.__name__ in pr.nn.__all__]
LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def samples(info):
    """For each sample: this package's function and torch's, of the tensors that follow and are differentiated."""
    torch.manual_seed(0)
    name = OPS[info.name]
    for sample in info.sample_inputs("cpu", torch.float64, requires_grad=True):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        if name == "dropout" and kwargs.get("training", True) and 0.0 < kwargs.get("p", 0.5) < 1.0:
            continue  # The numbers drawn are not torch's.
        # Running statistics are state, which neither side differentiates in training.
        state = {i: args[i].detach() for i in (1, 2) if name == "batch_norm" and args[i] is not None}
        places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in state]

        def call(space, *tensors, args=args, kwargs=kwargs, state=state, places=places):
            given = {**{i: value.clone() for i, value in state.items()}, **dict(zip(places, tensors, strict=True))}
            return getattr(space, name)(*[given.get(i, arg) for i, arg in enumerate(args)], **kwargs)

        functions = [functools.partial(call, space) for space in (pr.functional, F)]
        yield *functions, tuple(args[i].detach().requires_grad_() for i in places)


@pytest.mark.parametrize("info", INFOS, ids=lambda info: f"{info.name} {info.variant_test_name}".strip())
def test_op_samples(info):
    for ours, theirs, tensors in samples(info):
        results = ours(*tensors), theirs(*tensors)
        assert_close(*results, check_stride=True)
        cotangent = torch.randn_like(results[1])
        assert_close(*[torch.autograd.grad(y, tensors, cotangent) for y in results])
        primals = tuple(t.detach() for t in tensors)
        tangents = tuple(torch.randn_like(t) for t in primals)
        assert_close(*[torch.func.jvp(f, primals, tangents) for f in (ours, theirs)])
        options = {"fast_mode": True, "check_batched_grad": True}
        torch.autograd.gradgradcheck(ours, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, **options)


def modules(info, dtype, training):
    """For each input of torch's: a module of this package, torch's with the same state, and the arguments."""
    torch.manual_seed(0)
    for given in info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training):
        args, kwargs = given.constructor_input.args, given.constructor_input.kwargs
        theirs = info.module_cls(*args, **kwargs).to(dtype).train(training)
        for value in theirs.parameters():
            torch.nn.init.uniform_(value)
        ours = getattr(pr.nn, info.module_cls.__name__)(*args, **kwargs).to(dtype).train(training)
        ours.load_state_dict(theirs.state_dict())
        yield ours, theirs, given.forward_input.args


def step(module, x):
    x = x.detach().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return y, x.grad, [p.grad for p in module.parameters()], dict(module.state_dict())


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.module_cls.__name__)
def test_module_samples(info, dtype, training):
    for ours, theirs, (x,) in modules(info, dtype, training):
        for layout in LAYOUTS if info.module_memformat_affects_out else LAYOUTS[:1]:
            if layout is torch.contiguous_format or x.dim() == {torch.channels_last: 4}.get(layout, 5):
                given = x.detach().to(memory_format=layout)
                mine, their = [step(copy.deepcopy(module), given) for module in (ours, theirs)]
                assert_close(mine, their)
                assert [t.stride() for t in mine[:2]] == [t.stride() for t in their[:2]]


@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.module_cls.__name__)
def test_modules_go_through_files_and_devices(info):
    for ours, theirs, (x,) in modules(info, torch.float32, training=True):
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        loaded = torch.load(file)
        assert_close(step(loaded, x), step(copy.deepcopy(ours), x))
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        y = ours.to("meta")(x.to("meta"))
        assert (y.shape, y.device.type) == (x.shape, "meta")
