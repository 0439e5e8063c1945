"""Compiles functions as Inductor does, up to the graphs that it is given, and prints what is in them as JSON.

`python -m tests.compiled_graphs`, in a process without Triton's interpreter. No GPU takes part: CPU tensors pass for
those of a GPU where gradients are taken, because a CPU build of torch has no autograd for CUDA tensors, and nothing
is executed. Launches in the graphs can be compared with those that the launchers make outside of any graph.
"""

# Torch declares less for these entry points than they take.
# pyright: reportArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import sys
import unittest.mock
from typing import Any

import torch
import triton
from functorch.compile import make_boxed_func
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from triton._C.libtriton import ir
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import mangle_type

import primitives as pr
from perf.ops import CASES
from perf.workloads import launch_mode
from primitives._core import inductor, registered_primitives
from primitives.kernels.runtime.chips import CHIPS, use_chip
from primitives.kernels.runtime.kernel import Kernel, intercept
from primitives.testing._ptx.launching import StandInDriver

config: Any = triton.runtime.driver
config.set_active(StandInDriver("sm_90"))  # pyright: ignore[reportArgumentType] - it quacks
# The patterns that Inductor looks for in joint graphs take seconds to make, and cannot be made for CUDA without it.
joint_graph.lazy_init = lambda *args, **kwargs: None

ROWS, COLS = 48, 256


def described(value):
    """An argument of a launch as JSON: of a tensor what the kernel could see."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def launch_of(node: torch.fx.Node) -> dict:
    """The launch that a node of a graph stands for."""
    fields: dict[str, Any] = dict(node.kwargs)
    kernel: Any = kernel_side_table.get_kernel(fields["kernel_idx"])
    (config,) = kernel.configs
    (grid,) = fields["grid"]
    tensors = {name: v.meta["val"] if isinstance(v, torch.fx.Node) else v for name, v in fields["kwargs"].items()}
    given = {**tensors, **kernel_side_table.get_constant_args(fields["constant_args_idx"])}
    return {
        "name": kernel.fn.__name__,
        "grid": list(grid),
        "arguments": {name: described(given[name]) for name in sorted(given)},
        "num_warps": config.num_warps,
        "written": sorted(fields["tensors_to_clone"]),
    }


def content(graph: torch.fx.Graph) -> dict:
    """Kernels and operators of a graph, but for writes into its inputs."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    kernels = [node for node in calls if node.target is triton_kernel_wrapper_functional]
    return {
        "kernels": [launch_of(node) for node in kernels],
        "operators": [
            str(n.target) for n in calls if n not in kernels and n.target is not torch.ops.aten.copy_.default
        ],
        "devices": sorted({str(node.meta["val"].device) for node in calls if "empty" in str(node.target)}),
    }


def compiled_into(captured: list[dict], function, dynamic: bool = False):
    """`function` as Inductor compiles it, up to its graphs, whose contents are noted and which run as they are."""

    def capture(module, inputs, **kwargs):
        captured.append(content(module.graph))
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        return compile_fx(module, inputs, inner_compile=capture)

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def graphs(function, *args, dynamic: bool = False, backward: bool = False) -> list[dict]:
    """Contents of the graphs that Inductor is given for `function`, forward first."""
    captured: list[dict] = []
    out = compiled_into(captured, function, dynamic)(*args)
    if backward:
        torch.autograd.backward(out, torch.empty_like(out))
    return captured


def launches_outside(function, *args, backward: bool = False) -> list[dict]:
    """The launches of the same function outside of any graph, in order."""
    launches = []

    def note(kernel, grid, given, constants):
        # Graphs do without a bound on registers.
        options = {"num_warps", "maxnreg"} & constants.keys()
        named = dict(zip(kernel.argument_names, given, strict=False)) | constants
        arguments = {name: described(named[name]) for name in sorted(named.keys() - options)}
        launches.append(
            {"name": kernel.__name__, "grid": [*grid, 1, 1][:3], "arguments": arguments}
            | {"num_warps": constants["num_warps"]}
        )

    with contextlib.ExitStack() as stack:
        # Else plain calls on the CPU are left to torch.
        stack.enter_context(unittest.mock.patch("primitives._repair.plain._DTYPES", ()))
        stack.enter_context(intercept(note))
        for op in registered_primitives().values():
            table = op.rules.implementations
            stack.enter_context(unittest.mock.patch.dict(table["cpu"], auto=table["cuda"]["auto"]))
        out = function(*args)
        if backward:
            torch.autograd.backward(out, torch.empty_like(out))
    return launches


# Between functions that Inductor fuses.


def layer_norm(x, weight, bias):
    return pr.functional.layer_norm(x.sin(), (COLS,), weight, bias).cos()


def log_softmax(x):
    return pr.functional.log_softmax(x.sin(), 1).cos()


def add_layer_norm(x, weight, bias):
    seed, options = torch.zeros((), dtype=torch.int64, device=x.device), (0.25, x.dtype, 1, 0, 1e-5, True, False)
    y, s, *_ = torch.ops.primitives.add_layer_norm(x.sin(), x, weight, bias, seed, *options)
    return y.cos() + s


def batch_norm(x, weight, bias, running_mean, running_var):
    return pr.functional.batch_norm(x.sin(), running_mean, running_var, weight, bias, training=True).cos()


def layer_norm_hvp(x, weight, bias):
    slope = torch.func.grad(lambda x, weight: layer_norm(x, weight, bias).sum(), argnums=(0, 1))
    return torch.func.jvp(slope, (x, weight), (x, weight))[1]


def tensors(*shapes: tuple[int, ...], device: str = "cpu", requires_grad: bool = False) -> list[torch.Tensor]:
    """Tensors of these shapes."""
    return [torch.zeros(shape, device=device, requires_grad=requires_grad) for shape in shapes]


ROW_SHAPES = ((ROWS, COLS), (COLS,), (COLS,))
CHANNELS = 16
PROGRAMS = {
    "layer_norm": (layer_norm, ROW_SHAPES, True),
    "batch_norm": (batch_norm, ((8, CHANNELS, 14, 14), *((CHANNELS,),) * 4), True),
    "log_softmax": (log_softmax, ROW_SHAPES[:1], True),
    "add_layer_norm": (add_layer_norm, ROW_SHAPES, True),
    "hessian-vector product": (layer_norm_hvp, ROW_SHAPES, False),
}


def programs() -> dict:
    """For every program its graphs, and its launches outside of them."""
    found = {}
    for name, (function, shapes, backward) in PROGRAMS.items():

        def arguments(shapes=shapes, backward=backward):
            # Gradients are taken of an input, a weight and a bias, and not of running statistics.
            return tensors(*shapes[:3], requires_grad=backward) + tensors(*shapes[3:])

        with unset_fake_temporarily():
            outside = launches_outside(function, *arguments(), backward=backward)
        found[name] = {"graphs": graphs(function, *arguments(), backward=backward), "outside": outside}
    return found


def opaque() -> dict[str, list[dict]]:
    """Graphs in which the operator has to stay one."""
    args = tensors(*ROW_SHAPES)
    found = {"symbolic sizes": graphs(layer_norm, *args, dynamic=True)}
    with pr.use_backend("reference"):
        found["reference"] = graphs(layer_norm, *args)

    class Module(torch.nn.Module):
        forward = staticmethod(layer_norm)

    exported = torch.export.export(Module(), tuple(args))
    found["export"] = [content(exported.graph), content(exported.run_decompositions().graph)]
    return found


def another_backend() -> list[int]:
    """How many kernels the graphs have that one compiled function gets as the backend changes, and changes back."""
    captured: list[dict] = []
    compiled, args = compiled_into(captured, layer_norm), tensors(*ROW_SHAPES)
    for name in ("auto", "reference", "auto"):
        with pr.use_backend(name):
            compiled(*args)
    return [len(graph["kernels"]) for graph in captured]


def cache_keys() -> list[bool]:
    """Whether the key of cached graphs is the same for the same backend, and another one for another."""
    graph = make_fx(layer_norm, tracing_mode="fake")(*tensors(*ROW_SHAPES))

    def key() -> list[str]:
        return AOTAutogradCacheDetails.__new__(AOTAutogradCacheDetails).get_triton_source_codes_from_gm(graph)

    first, again = key(), key()
    with pr.use_backend("reference"):
        other = key()
    return [len(first) == 1, first == again, first != other]


def inductor_source(kernel: Kernel, args: tuple, constants: dict[str, Any]) -> ASTSource:
    """Arguments of Triton's compiler under Inductor: a 1 is a constant, whatever the kernel asks, a float a float32."""
    given = dict(zip(kernel.argument_names, args, strict=False)) | kernel._all_constants(len(args), constants)
    signature, fixed = {}, {}
    for parameter in kernel.function.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], fixed[(parameter.num,)] = "constexpr", value
        else:
            signature[parameter.name] = mangle_type(value)
    return ASTSource(kernel.function, signature, fixed, {})


def ones() -> dict[str, list[str]]:
    """Of launches with numbers of one, by kernel, what Triton has against them as Inductor compiles them.

    One row, or sample, of the workloads that reach every kernel.
    """
    target = config.active.get_current_target()
    compiler: Any = make_backend(target)
    options = compiler.parse_options({})
    found: dict[str, list[str]] = {}

    known = set()

    def make_ir(kernel, grid, args, constants):
        source = inductor_source(kernel, args, constants)
        # The same kernel of other dtypes has the same ones.
        key = kernel.__name__, str([place for place, value in source.constants.items() if value == 1])
        if key in known:
            return
        known.add(key)
        context = ir.context()
        ir.load_dialects(context)
        compiler.load_dialects(context)
        complaints = found.setdefault(kernel.__name__, [])
        if any("fp" in kind and not kind.startswith("*") for kind in source.signature.values()):
            complaints.append("a number that loses digits")
        try:
            source.make_ir(target, options, compiler.get_codegen_implementation(options), {}, context)
        except triton.CompilationError as error:
            complaints.append(str(error))

    with intercept(make_ir), unset_fake_temporarily():
        for case in CASES:
            for workload, _ in case.resized:
                for mode in workload.modes:
                    launch_mode(dataclasses.replace(workload, shape=(1, *workload.shape[1:])), mode)
    return found


def main() -> None:
    """Run all checks."""
    everything = {}
    with (
        use_chip(CHIPS["sm_90"]),
        functorch_config.patch(enable_autograd_cache=False),
        # The graphs are executed too, and the kernels in them cannot be: tensors without memory need none.
        FakeTensorMode(),
    ):
        # A forward pass of CUDA tensors that have no memory.
        everything["on_fake_cuda"] = graphs(layer_norm, *tensors(*ROW_SHAPES, device="cuda"))
        is_shown = inductor._is_shown

        def is_shown_on_the_cpu(*call):
            with unittest.mock.patch.object(torch.Tensor, "is_cuda", True):
                return is_shown(*call)

        inductor._is_shown = is_shown_on_the_cpu
        for check in (programs, opaque, cache_keys, another_backend, ones):
            everything[check.__name__] = check()
    json.dump(everything, sys.stdout)


if __name__ == "__main__":
    main()
