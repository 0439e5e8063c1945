"""Cycles of a kernel that is a chain, against figures worked out by hand."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from perf.machine_code import stalls
from perf.machine_code.listing import listings


@triton.jit
def _chain_kernel(x_ptr, num_trips, GATHER: tl.constexpr):  # noqa: N803 - Triton's own spelling of constants
    lane = tl.arange(0, 32)
    value = tl.load(x_ptr + lane)
    for _ in tl.range(0, num_trips):
        if GATHER:
            value = tl.load(x_ptr + value.to(tl.int32))
        for _ in tl.static_range(64):
            value = value * value + 1.5
    tl.store(x_ptr + lane, value)


def test_cycles_of_a_known_chain():
    found = []
    for gathers in (False, True):
        types = {"x_ptr": "*fp32", "num_trips": "i32", "GATHER": "constexpr"}
        source = triton.compiler.ASTSource(_chain_kernel, types, {"GATHER": gathers})
        options = {"num_warps": 1, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        (code,) = listings("sm_90", [compiled.asm["cubin"]])
        found.append(stalls.cycles(code, stalls.loops(code)))
    (outside, (chain,)), (_, (gathering,)) = found
    # Each product with a sum waits four cycles for the one before it, which the control words say; a load that the
    # chain goes through waits for memory, which they do not.
    assert 4 * 64 <= chain <= 4 * 64 + 10
    assert 0 < gathering - chain - stalls.LATENCIES["LDG"] < 40
    assert outside > stalls.LATENCIES["LDG"]
