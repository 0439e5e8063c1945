"""`torch.compile` is shown the kernels inside primitives, below every transform, and launches what would be launched.

Functions are compiled as Inductor does, up to the graphs that it is given. No GPU takes part, and nothing is executed:
CPU tensors pass for those of a GPU where gradients are taken, because a CPU build of torch has no autograd for CUDA
tensors. Launches in the graphs are compared with those that the launchers make outside of any graph.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from functorch.compile import make_boxed_func
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor import config as inductor_config
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
from primitives.kernels.runtime.kernel import INTERPRETED, Kernel, intercept
from primitives.ops.norms.layer_norm import NormOptions
from primitives.testing._ptx.launching import StandInDriver
from tests.support import noting

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="graphs hold kernels as Triton compiles them"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS, COLS, CHANNELS = 48, 256, 16


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made and not executed for sm_90, of tensors without memory."""
    triton.runtime.driver.set_active(StandInDriver("sm_90"))
    # The patterns that Inductor looks for in joint graphs take seconds to make, and cannot be made for CUDA without it.
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *args, **kwargs: None)
    # Nothing is compiled to code: workers for it would each import torch.
    configs = functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(compile_threads=1)
    with use_chip(CHIPS["sm_90"]), configs[0], configs[1], FakeTensorMode():
        yield
    triton.runtime.driver.set_active(None)
    torch.compiler.reset()


@pytest.fixture
def as_if_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors pass for those of a GPU."""
    is_shown = inductor._is_shown

    def is_shown_on_the_cpu(*call: Any) -> bool:
        with patch.object(torch.Tensor, "is_cuda", True):
            return is_shown(*call)

    monkeypatch.setattr(inductor, "_is_shown", is_shown_on_the_cpu)


def described(value: Any) -> Any:
    """An argument of a launch; of a tensor what the kernel could see."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def launch_of(node: torch.fx.Node) -> dict[str, Any]:
    """The launch that a node of a graph stands for."""
    fields: dict[str, Any] = dict(node.kwargs)
    kernel: Any = kernel_side_table.get_kernel(fields["kernel_idx"])
    (config,) = kernel.configs
    (grid,) = fields["grid"]
    tensors = {name: v.meta["val"] if isinstance(v, torch.fx.Node) else v for name, v in fields["kwargs"].items()}
    given = {**tensors, **kernel_side_table.get_constant_args(fields["constant_args_idx"])}
    return {
        "name": kernel.fn.__name__,
        "grid": [*grid],
        "arguments": {name: described(value) for name, value in given.items()},
        "num_warps": config.num_warps,
        "written": {*fields["tensors_to_clone"]},
    }


def content(graph: torch.fx.Graph) -> dict[str, Any]:
    """Kernels and operators of a graph, but for writes into its inputs."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    kernels = [node for node in calls if node.target is triton_kernel_wrapper_functional]
    return {
        "kernels": [launch_of(node) for node in kernels],
        "operators": [
            str(n.target) for n in calls if n not in kernels and n.target is not torch.ops.aten.copy_.default
        ],
        "devices": {str(node.meta["val"].device) for node in calls if "empty" in str(node.target)},
    }


def compiled_into(captured: list[dict], function: Callable, dynamic: bool = False) -> Callable:
    """`function` as Inductor compiles it, up to its graphs, whose contents are noted and which run as they are."""

    def capture(module, inputs, **kwargs):
        captured.append(content(module.graph))
        return make_boxed_func(module.forward)

    def backend(module, inputs):
        return compile_fx(module, inputs, inner_compile=capture)

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def run(function: Callable, args: Any, backward: bool) -> None:
    out = function(*args)
    if backward:
        torch.autograd.backward(out, torch.empty_like(out))


def graphs(function: Callable, *args: Any, dynamic: bool = False, backward: bool = False) -> list[dict]:
    """Contents of the graphs that Inductor is given for `function`, forward first."""
    captured: list[dict] = []
    run(compiled_into(captured, function, dynamic), args, backward)
    return captured


def launches_outside(function: Callable, args: Any, backward: bool) -> list[dict]:
    """The launches of the same function outside of any graph, in order."""
    launches = []

    def note(kernel, grid, given, constants):
        # Graphs do without a bound on registers.
        options = {"num_warps", "maxnreg"} & constants.keys()
        named = dict(zip(kernel.argument_names, given, strict=False)) | constants
        arguments = {name: described(value) for name, value in named.items() if name not in options}
        launches.append(
            {"name": kernel.__name__, "grid": [*grid, 1, 1][:3], "arguments": arguments}
            | {"num_warps": constants["num_warps"]}
        )

    with contextlib.ExitStack() as stack:
        # Else plain calls on the CPU are left to torch.
        stack.enter_context(patch("primitives._repair.plain._DTYPES", ()))
        stack.enter_context(intercept(note))
        for op in registered_primitives().values():
            table = op.rules.implementations
            stack.enter_context(patch.dict(table["cpu"], auto=table["cuda"]["auto"]))
        run(function, args, backward)
    return launches


# Between functions that Inductor fuses.


def layer_norm(x, weight, bias):
    return pr.functional.layer_norm(x.sin(), (COLS,), weight, bias).cos()


def log_softmax(x):
    return pr.functional.log_softmax(x.sin(), 1).cos()


def add_layer_norm(x, weight, bias):
    seed, options = torch.zeros((), dtype=torch.int64, device=x.device), (0.25, x.dtype, *NormOptions(1, 1e-5))
    y, s, *_ = torch.ops.primitives.add_layer_norm(x.sin(), x, weight, bias, seed, *options)
    return y.cos() + s


def batch_norm(x, weight, bias, running_mean, running_var):
    return pr.functional.batch_norm(x.sin(), running_mean, running_var, weight, bias, training=True).cos()


def layer_norm_hvp(x, weight, bias):
    slope = torch.func.grad(lambda x, weight: layer_norm(x, weight, bias).sum(), argnums=(0, 1))
    return torch.func.jvp(slope, (x, weight), (x, weight))[1]


def tensors(shapes: tuple, device: str = "cpu", requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.zeros(shape, device=device, requires_grad=requires_grad) for shape in shapes]


ROW_SHAPES = ((ROWS, COLS), (COLS,), (COLS,))
# A function, the shapes of its arguments, and how many graphs it has: two where gradients are taken.
PROGRAMS = {
    "layer_norm": (layer_norm, ROW_SHAPES, 2),
    "batch_norm": (batch_norm, ((8, CHANNELS, 14, 14), *((CHANNELS,),) * 4), 2),
    "log_softmax": (log_softmax, ROW_SHAPES[:1], 2),
    "add_layer_norm": (add_layer_norm, ROW_SHAPES, 2),
    "hessian-vector product": (layer_norm_hvp, ROW_SHAPES, 1),
}

# Launches outside of graphs whose results go unused: the first-order cotangent of the weight.
UNUSED = {"hessian-vector product": ["add_partial_rows_kernel"]}

# A tensor that no kernel writes: a graph would copy it for the result.
READ_ONLY = {"x_ptr", "weight_ptr", "bias_ptr", "y_bar_ptr", "x_dot_ptr", "weight_dot_ptr", "bias_dot_ptr"}
READ_ONLY |= {"residual_ptr", "s_bar_ptr", "seed_ptr"}


def primitives_in(graph):
    return [name for name in graph["operators"] if name.startswith("primitives.")]


@pytest.mark.usefixtures("as_if_cuda")
@pytest.mark.parametrize("program", PROGRAMS)
def test_graphs_hold_kernels_and_no_primitive(program):
    function, shapes, number = PROGRAMS[program]
    backward = number == 2

    def arguments():
        # Gradients are taken of an input, a weight and a bias, and not of running statistics.
        return tensors(shapes[:3], requires_grad=backward) + tensors(shapes[3:])

    with unset_fake_temporarily():
        outside = launches_outside(function, arguments(), backward)
    found = graphs(function, *arguments(), backward=backward)
    assert len(found) == number
    for graph in found:
        assert graph["kernels"]
        assert primitives_in(graph) == []
        # A kernel that writes into views would have their whole base copied around it.
        assert not [name for name in graph["operators"] if "scatter" in name or "copy" in name or "clone" in name]
        for launch in graph["kernels"]:
            assert launch["written"], launch["name"]
            assert not READ_ONLY & launch.pop("written"), launch["name"]
            # The same grids, constants, strides and warps as outside: there kernel tests hold the values to the truth.
            outside.remove(launch)
    assert [launch["name"] for launch in outside] == UNUSED.get(program, [])


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


@pytest.mark.nightly
def test_numbers_that_are_one_may_be_constants():
    """Inductor makes every 1 a constant, which has no methods, and every float a float32.

    One row, or sample, of the workloads that reach every kernel.
    """
    target = triton.runtime.driver.active.get_current_target()
    compiler: Any = make_backend(target)
    options = compiler.parse_options({})
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
        loses_digits = any("fp" in kind and not kind.startswith("*") for kind in source.signature.values())
        assert not loses_digits, f"{kernel.__name__}: a number that loses digits"
        source.make_ir(target, options, compiler.get_codegen_implementation(options), {}, context)

    with intercept(make_ir), unset_fake_temporarily():
        for case in CASES:
            for workload in case.workloads("resized"):
                for mode in workload.modes:
                    launch_mode(dataclasses.replace(workload, shape=(1, *workload.shape[1:])), mode)
    assert len({name for name, _ in known}) > 10


def test_cuda_tensors_without_memory_or_device_are_enough():
    (graph,) = graphs(layer_norm, *tensors(ROW_SHAPES, device="cuda"))
    assert [launch["name"] for launch in graph["kernels"]] == ["layer_norm_fwd_kernel"]
    assert graph["devices"] == {"cuda:0"}


def exported() -> list[dict]:
    class Module(torch.nn.Module):
        forward = staticmethod(layer_norm)

    program = torch.export.export(Module(), tuple(tensors(ROW_SHAPES)))
    return [content(program.graph), content(program.run_decompositions().graph)]


def by_another_compiler() -> list[dict]:
    captured: list[dict] = []

    backend = noting(lambda module: captured.append(content(module.graph)))
    torch.compile(layer_norm, fullgraph=True, backend=backend)(*tensors(ROW_SHAPES))
    return captured


OPAQUE = {
    "another compiler": by_another_compiler,
    "symbolic sizes": lambda: graphs(layer_norm, *tensors(ROW_SHAPES), dynamic=True),
    "reference": lambda: pr.use_backend("reference")(graphs)(layer_norm, *tensors(ROW_SHAPES)),
    "export": exported,
}


@pytest.mark.usefixtures("as_if_cuda")
@pytest.mark.parametrize("reason", OPAQUE)
def test_the_operator_stays_opaque(reason):
    found = OPAQUE[reason]()
    assert found
    for graph in found:
        assert graph["kernels"] == []
        assert primitives_in(graph) == ["primitives.layer_norm.default"]


@pytest.mark.usefixtures("as_if_cuda")
def test_graphs_are_told_apart_by_backend():
    """Another backend compiles anew, a third call under the first runs the first graph; so do graphs in the cache."""
    captured: list[dict] = []
    compiled, args = compiled_into(captured, layer_norm), tensors(ROW_SHAPES)
    for name in ("auto", "reference", "auto"):
        with pr.use_backend(name):
            compiled(*args)
    assert [len(graph["kernels"]) for graph in captured] == [1, 0]
    graph = make_fx(layer_norm, tracing_mode="fake")(*args)

    def key() -> list[str]:
        return AOTAutogradCacheDetails.__new__(AOTAutogradCacheDetails).get_triton_source_codes_from_gm(graph)

    first, again = key(), key()
    with pr.use_backend("reference"):
        other = key()
    assert (len(first), first == again, first != other) == (1, True, True)
