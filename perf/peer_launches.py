"""Launches of a step on an H100, by this package and by peers, taken down on a machine without a GPU.

Inductor generates Triton code for a GPU if torch is told what the GPU would be; Liger's kernels are called with tensors
that are not there. Nothing runs: launches are taken down. Torch stays patched, so this needs a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import types
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import torch.utils._triton as triton_support
import triton
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from perf import model
from perf.calls import EPS
from perf.machine_code.compiling import StandInDriver
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from perf.ops.workload import Workload

CHIP = CHIPS["sm_90"]


class Launch(NamedTuple):
    """One launch: Triton's function, its grid, arguments and options; of what torch itself runs only the tensors."""

    function: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]


# For each launch its configurations, of which tuning would take the fastest.
Launches = list[list[Launch]]


def pretend_cuda() -> None:
    """Tell torch and Triton of an H100 for the rest of this process; what would touch it does nothing."""
    triton.runtime.driver.set_active(StandInDriver(CHIP.name))  # pyright: ignore[reportArgumentType] - it quacks
    properties = types.SimpleNamespace(
        **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "warp_size": CHIP.warp_size, "gcnArchName": ""},
        **{"multi_processor_count": CHIP.num_processors, "regs_per_multiprocessor": CHIP.registers, "uuid": ""},
        **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "total_memory": 80 << 30},
        **{"shared_memory_per_block": 49152, "shared_memory_per_block_optin": CHIP.shared_bytes},
        **{"shared_memory_per_multiprocessor": CHIP.processor_shared_bytes, "L2_cache_size": 50 << 20},
    )
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported", "is_triton_capable"), True),
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), properties),
        **{"device_count": 1, "current_device": 0, "get_device_capability": (9, 0), "get_compute_capability": 90},
        **dict.fromkeys(("set_device", "raise_if_triton_unavailable", "synchronize"), None),
        **dict.fromkeys(("device", "_DeviceGuard"), contextlib.nullcontext()),
    }
    for name, answer in answers.items():
        says = _always(answer)
        setattr(torch.cuda, name, says)
        for side in (interfaces.CudaInterface, interfaces.CudaInterface.Worker):
            setattr(side, name, staticmethod(says))
    torch.version.cuda = "12.8"
    torch._C._cuda_getCurrentRawStream = _always(0)
    triton_support.has_triton = triton_support.has_triton_package = _always(True)
    triton_helpers.set_driver_to_gpu = CachingAutotuner.precompile = _always(None)
    inductor_config.compile_threads = 1


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **options: answer


class _Watch(TorchDispatchMode):
    """Takes down what torch itself launches."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not re.match("aten.*empty|prim", str(func)):
            tensors = tuple(leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor))
            self._launches.append([Launch(None, (1,), tensors, {})])
        return result


@contextlib.contextmanager
def _recorded() -> Iterator[Launches]:
    """The launches within."""
    launches: Launches = []

    def of_inductor(tuner: Any, *args: Any, stream: Any = None, **options: Any) -> None:
        named, found = dict(zip(tuner.fn.arg_names, args, strict=False)), []
        for config in tuner.configs:
            grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow({**named, **config.kwargs})
            chosen = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
            found.append(Launch(tuner.fn, grid, args, chosen))
        launches.append(found)

    def of_triton(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append([Launch(function, grid, args, options)])

    inductors = mock.patch.object(CachingAutotuner, "run", of_inductor)
    with inductors, mock.patch.object(JITFunction, "run", of_triton), _Watch(launches):
        yield launches


def of_ours(workload: Workload, mode: str) -> Launches:
    """Launches of this package."""
    steps = model.steps_of(workload, mode, CHIP)
    return [[Launch(one.kernel.function, one.grid, one.args, one.constants)] for _, found in steps for one in found]


def _operands(workload: Workload, device: str = "meta") -> list[Tensor]:
    """Input, statistics, weight and bias of an op, none of which is there."""
    layout = torch.channels_last if workload.channels_last else torch.contiguous_format
    x = torch.empty(workload.shape, dtype=workload.torch_dtype, device=device, memory_format=layout)
    statistics = workload.shape[1:2] if workload.op == "batch_norm" else (*workload.shape[:-1], 1)
    params = [x.new_empty((workload.num_params,), dtype=workload.param_dtype)] * 2 * (workload.num_params > 0)
    return [x, x.new_empty(statistics, dtype=torch.float32), *params]


def _step(workload: Workload, mode: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """Functions that `torch.compile` would be given for a mode, and operands."""
    aten, size, dim, every = torch.ops.aten, list(workload.shape[-1:]), workload.dim, [True] * 3
    x, statistics, *params = _operands(workload)
    functions: dict[str, tuple[Callable[..., Any], ...]] = {
        "layer_norm": (
            lambda x, *params: F.layer_norm(x, size, *params, eps=EPS),
            lambda x, *params: aten.native_layer_norm(x, size, *params, EPS),
            lambda y_bar, x, *rest: aten.native_layer_norm_backward(y_bar, x, size, *rest, every),
        ),
        "batch_norm": (
            lambda x, *params: F.batch_norm(x, None, None, *params, training=True, eps=EPS),
            lambda x, *params: aten.native_batch_norm(x, *params, None, None, True, 0.1, EPS),
            lambda y_bar, x, mean, rstd, weight, bias: aten.native_batch_norm_backward(
                y_bar, x, weight, None, None, mean, rstd, True, EPS, every
            ),
        ),
        "log_softmax": (
            lambda x: F.log_softmax(x, dim),
            lambda x: aten._log_softmax(x, dim, False),
            lambda y_bar, y, *statistics: aten._log_softmax_backward_data(y_bar, y, dim, y.dtype),
        ),
    }
    function, forward, backward = functions[workload.op]

    def jvp(x: Tensor, x_dot: Tensor, *rest: Tensor) -> Any:
        half = len(rest) // 2
        return torch.func.jvp(function, (x, *rest[:half]), (x_dot, *rest[half:]))

    def double_backward(x: Tensor, y_bar: Tensor, x_bar_bar: Tensor, weight: Tensor, bias: Tensor) -> Any:
        def x_bar(x: Tensor, weight: Tensor, y_bar: Tensor) -> Tensor:
            return torch.func.vjp(lambda x: function(x, weight, bias), x)[1](y_bar)[0]

        return torch.func.vjp(x_bar, x, weight, y_bar)[1](x_bar_bar)

    return {
        "forward": (forward, [x, *params]),
        "backward": (backward, [x, x, statistics, statistics, *params]),
        "jvp": (jvp, [x, x, *params, *params]),
        "double_backward": (double_backward, [x, x, x, *params]),
    }[mode]


def of_inductor(workload: Workload, mode: str) -> Launches:
    """Launches of what Inductor generates for a step."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    step, tensors = _step(workload, mode)

    def inputs(device: str) -> list[Tensor]:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors]

    # Autograd of a build without CUDA knows only the CPU's device, so the derivatives are taken there.
    with FakeTensorMode(), torch.enable_grad():
        graph = torch.func.functionalize(make_fx(step)(*inputs("cpu")))
        with torch.no_grad():
            graph = make_fx(graph, decomposition_table=select_decomp_table())(*inputs("cpu"))
    graph = torch.fx.GraphModule(graph, fx_graph_cse(graph.graph))
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    graph.recompile()
    with FakeTensorMode() as fake, torch.no_grad(), V.set_fake_mode(fake):
        graph = make_fx(graph)(*inputs("cuda:0"))
        _recursive_post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(graph)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs("cuda:0"))
            code = lowering.codegen()[0]
    generated: dict[str, Any] = {"__name__": "generated"}
    exec(str(getattr(code, "value", code)), generated)
    generated |= dict.fromkeys(("assert_size_stride", "assert_alignment"), _always(None))
    generated["empty_strided_cuda"] = lambda *sizes: torch.empty_strided(*sizes[:2], dtype=sizes[2], device="meta")
    with _recorded() as launches:
        generated["call"](inputs("meta"))
    return launches


def of_liger(workload: Workload, mode: str, op: str = "layer_norm") -> Launches:
    """Launches of Liger's layer norm, or of the forward of an op like it; none of what it does not have."""
    if workload.op != "layer_norm" or mode not in {"forward", "backward"}:
        return []
    ops = importlib.import_module(f"liger_kernel.ops.{op}")
    with FakeTensorMode():
        x, statistics, weight, bias = _operands(workload, "cuda:0")
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("layer_norm", "forward"): lambda: ops.layer_norm_forward(x, weight, bias, EPS),
            ("layer_norm", "backward"): lambda: ops.layer_norm_backward(x, x, weight, bias, statistics, statistics),
            ("rms_norm", "forward"): lambda: ops.rms_norm_forward(x, weight, EPS, 0.0, "llama", None),
            ("softmax", "forward"): lambda: ops._softmax_forward(x),
        }
        with _recorded() as launches:
            calls[op, mode]()
    return launches
