"""Compiles the kernels for chosen chips on a machine without a GPU, through the launchers' own code.

`python -m tests.kernels.compile_support --target sm_90` calls the launchers with CPU tensors while a stand-in Triton
driver answers for the chip. Every launch compiles its kernel with the block sizes, warps, stages and argument
alignments that the real chip would see, and runs nothing. One JSON line per compiled kernel goes to standard output.

This needs a process in which `TRITON_INTERPRET` is not set: Triton reads it when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the stand-in driver tells of a chip; the numbers are those of the vendor's data sheet."""

    backend: str
    arch: int | str
    warp_size: int
    num_processors: int
    max_shared_mem: int


CHIPS = {
    "sm_80": Chip("cuda", 80, 32, 108, 166912),
    "sm_90": Chip("cuda", 90, 32, 132, 232448),
    "sm_100": Chip("cuda", 100, 32, 148, 232448),
    "gfx942": Chip("hip", "gfx942", 64, 304, 65536),
}


@dataclasses.dataclass(frozen=True)
class Record:
    """What the compiler made of one kernel.

    `spills` is in bytes of stack per thread on NVIDIA and in registers on AMD; `widest_load_bytes` is the widest load
    from global memory that one thread issues.
    """

    target: str
    case: str
    kernel: str
    num_warps: int
    registers: int
    spills: int
    local_bytes: int
    shared_bytes: int
    widest_load_bytes: int


class StandInDriver:
    """Answers what Triton asks of a driver up to the point where a compiled kernel would be loaded."""

    def __init__(self, target: str) -> None:
        """Stand in for the driver of the chip `CHIPS[target]`."""
        self._chip = CHIPS[target]
        # Triton keeps compiled kernels per device number, so that each chip needs its own.
        self._device = list(CHIPS).index(target)
        self.utils = self

    def get_current_target(self):
        """Target that Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self._chip.backend, self._chip.arch, self._chip.warp_size)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Limits that Triton checks a compiled kernel against."""
        return {
            "max_shared_mem": self._chip.max_shared_mem,
            "multiprocessor_count": self._chip.num_processors,
            "warpSize": self._chip.warp_size,
            "max_num_regs": 65536,
        }

    def get_current_device(self) -> int:
        """Number of the device, one per chip."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Handle of the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Device of the tensors that the launchers are given."""
        return torch.device("cpu")

    def is_active(self) -> bool:
        """Whether the driver can be used: always."""
        return True


@contextlib.contextmanager
def compiling_for(target: str, records: list[Record], case_name: list[str]) -> Iterator[None]:
    """Inside, launching a kernel compiles it for `target` and appends a record instead of running it.

    Args:
        target: A key of `CHIPS`.
        records: Receives one record per distinct compiled kernel.
        case_name: One string, the name of the case under way; the caller changes it between cases.
    """
    import triton
    from triton.runtime.jit import JITFunction

    import triton_kernels.launch as launch

    chip = CHIPS[target]
    launch_kernel, count_processors, hip = JITFunction.run, launch.num_processors, torch.version.hip
    seen = set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled = launch_kernel(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            records.append(inspect_kernel(target, case_name[0], compiled))
        return compiled

    triton.runtime.driver.set_active(StandInDriver(target))
    JITFunction.run = compile_only
    launch.num_processors = lambda device: chip.num_processors
    # What the planner asks to learn how many threads a warp has.
    torch.version.hip = "stand-in" if chip.backend == "hip" else None
    try:
        yield
    finally:
        JITFunction.run, launch.num_processors, torch.version.hip = launch_kernel, count_processors, hip


def inspect_kernel(target: str, case: str, compiled) -> Record:
    """Registers, spills, memory and load width of a compiled kernel."""
    usage = _amd_usage(compiled) if CHIPS[target].backend == "hip" else _nvidia_usage(compiled)
    registers, spills, local_bytes, widest_load_bytes = usage
    metadata = compiled.metadata
    return Record(
        target=target,
        case=case,
        kernel=metadata.name,
        num_warps=metadata.num_warps,
        registers=registers,
        spills=spills,
        local_bytes=local_bytes,
        shared_bytes=metadata.shared,
        widest_load_bytes=widest_load_bytes,
    )


def _nvidia_usage(compiled) -> tuple[int, int, int, int]:
    import triton

    cuobjdump = pathlib.Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        dump = subprocess.run([cuobjdump, "-res-usage", cubin.name], check=True, capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump))
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d+))?\.[bfsu](\d+)\b", compiled.asm["ptx"])
    widths = [int(count or 1) * int(bits) // 8 for count, bits in loads]
    # Loads that a loop issues ahead of time go to shared memory without passing through a register.
    widths += [int(size, 0) for size in re.findall(r"cp\.async\.c[ag][^;]*\], (\w+)", compiled.asm["ptx"])]
    widest = max(widths, default=0)
    return int(usage["REG"]), int(usage["STACK"]), int(usage["LOCAL"]), widest


def _amd_usage(compiled) -> tuple[int, int, int, int]:
    assembly = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0])

    spills = field("vgpr_spill_count") + field("sgpr_spill_count")
    widths = re.findall(r"(?:global|buffer|flat)_load_(ubyte|sbyte|ushort|sshort|short|dword(?:x\d)?)", assembly)
    num_bytes = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}
    widest = max((num_bytes.get(width) or 4 * int(width[-1]) for width in widths), default=0)
    return field("vgpr_count"), spills, field("private_segment_fixed_size"), widest


def _write_line(fields: dict) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Compile all cases for one target; returns 1 if one of them raised."""
    parser = argparse.ArgumentParser(description="Compile the kernels for one chip and print what came out.")
    parser.add_argument("--target", choices=CHIPS, required=True)
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    options = parser.parse_args()

    from tests.kernels.compile_cases import compile_cases

    records: list[Record] = []
    case_name = [""]
    num_printed = num_failed = 0
    with compiling_for(options.target, records, case_name):
        for name, launch_case in compile_cases(options.target):
            if options.only not in name:
                continue
            case_name[0] = name
            try:
                launch_case()
            except Exception:
                num_failed += 1
                _write_line({"target": options.target, "case": name, "error": traceback.format_exc()})
            for record in records[num_printed:]:
                _write_line(dataclasses.asdict(record))
            num_printed = len(records)
    return 1 if num_failed else 0


if __name__ == "__main__":
    # A kernel from an earlier compiler or an earlier edit must not stand in for this one.
    with tempfile.TemporaryDirectory() as cache_dir:
        os.environ["TRITON_CACHE_DIR"] = cache_dir
        # Line tables take a tenth of the time and change no instruction.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        sys.exit(main())
