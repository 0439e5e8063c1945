"""`check_kernel`: Triton kernels, compiled for a GPU that is not there, executed and checked on the CPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from primitives._core.errors import BackendError, DeviceError, PrimitivesError, check_arguments, check_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from primitives.testing._ptx.launching import Launched
    from primitives.testing._ptx.memory import Fault

CHIPS = ("sm_80", "sm_90")


class KernelError(PrimitivesError, AssertionError):
    """A kernel does something wrong.

    Attributes:
        report: All faults, and what was executed.
    """

    def __init__(self, report: KernelReport) -> None:
        self.report = report
        super().__init__(str(report))

    def __reduce__(self) -> tuple[Any, ...]:
        """Test runners send errors between processes."""
        return KernelError, (self.report,)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Outcome of `check_kernel`; prints as text.

    Attributes:
        chip: The chip that the kernels were compiled for.
        results: What the launcher returned.
        faults: What is wrong: kernel, kind, line of the PTX, count and detail of each.
        launches: Kernel, grid, bytes loaded and stored by argument, and counts of each launch.
    """

    chip: str
    results: Any
    faults: tuple[Fault, ...]
    launches: tuple[Launched, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def __str__(self) -> str:
        lines = [str(launch) for launch in self.launches]
        faults = [f"  {fault}" for fault in self.faults] or ["  none"]
        return "\n".join([f"Compiled for {self.chip} and emulated:", *lines, "Faults:", *faults])


def check_kernel(
    launcher: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    chip: str = "sm_80",
    worst_approximations: bool = False,
    raise_on_failure: bool = True,
) -> KernelReport:
    """Compile what a launcher launches for a chip, execute the PTX on the CPU, and report what is wrong about it.

    No GPU is needed. It is an emulation, of some million instructions of threads a second: take small shapes, and
    several of them where a kernel has a loop, as only what they do is checked. Compare the results with your
    reference yourself. The kinds of faults:

    - `race`: two threads of a block touch a byte of shared memory, one of them writes, and no barrier lies between.
    - `replicas differ`: threads store different values at one place in one instruction; which one stays is undefined.
    - `block race`: a program touches what another one stores, so that the result depends on their order.
    - `out of bounds`: an access outside of the elements of its argument, or of shared memory.
    - `misaligned`: an address that is no multiple of the access's size: the compiler was told a wrong divisibility.
    - `undefined value`: what is stored, an address or a branch follows from memory that nobody has written, or from a
      masked load without `other`.
    - `unfinished copy`, `unfinished product`: memory of a `cp.async` or a `wgmma` is touched before a wait for it.
    - `barrier divergence`, `divergence`: not all threads of a block come to a barrier, or of a warp to an instruction
      of the warp, or of four warps to a `wgmma`.

    Args:
        launcher: A function that launches kernels of `triton.jit`.
        args: Tuple of its positional arguments, with tensors on the CPU, which the kernels read and write.
        kwargs: Its keyword arguments.
        chip: `"sm_80"` or `"sm_90"`.
        worst_approximations: Whether `exp2`, division and other approximations are off by as much as NVIDIA allows,
            instead of rounded correctly.
        raise_on_failure: Whether to raise if something is wrong, or only to report it.

    Returns:
        A `KernelReport`: what the launcher returned, the faults, and counts of each launch.

    Raises:
        KernelError: If something is wrong.
        UnsupportedInstructionError: A `NotImplementedError` with the name of an instruction that is not emulated.
        BackendError: If Triton or NumPy 2 is missing, Triton interprets kernels, or the launcher launches none.
        DeviceError: If a tensor is not on the CPU.
        TypeError: If `launcher` is not callable, or `args` not a tuple.
        ValueError: If there is no such chip.

    Example:
        >>> import torch, primitives as pr
        >>> from primitives.kernels.softmax.log_softmax import log_softmax_fwd
        >>> report = pr.testing.check_kernel(log_softmax_fwd, (torch.randn(4, 100), 1, None))
        >>> report.ok, report.launches[0].loads["x_ptr"].num_bytes
        (True, 1600)
    """
    check_callable("check_kernel", launcher)
    check_arguments("check_kernel", "args", args)
    if chip not in CHIPS:
        raise ValueError(f"check_kernel: chip must be one of {', '.join(CHIPS)}, got {chip!r}.")
    given = dict(kwargs or {})
    for each in tree_leaves((args, given)):
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            raise DeviceError(
                f"check_kernel: kernels are emulated on the CPU, got a tensor on {each.device}. Use .cpu()."
            )
    emulated = _emulator()
    with emulated(chip, is_approximate=worst_approximations) as seen:
        results = launcher(*args, **given)
    if not seen.launches:
        raise BackendError("check_kernel: the launcher launched no kernel of triton.jit on these arguments.")
    report = KernelReport(chip, results, tuple(seen.faults), tuple(seen.launches))
    if raise_on_failure and not report.ok:
        raise KernelError(report)
    return report


def _emulator() -> Callable[..., Any]:
    try:
        import numpy as np
        from triton import knobs
    except ImportError as error:
        raise BackendError(f"check_kernel needs Triton and NumPy, which fail to import: {error}.") from error
    if int(np.__version__.split(".")[0]) < 2:
        raise BackendError(f"check_kernel needs NumPy 2 or newer, got {np.__version__}.")
    if knobs.runtime.interpret:
        raise BackendError("check_kernel compiles kernels: start the process without TRITON_INTERPRET.")
    from primitives.testing._ptx.launching import emulated

    return emulated
