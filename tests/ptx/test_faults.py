"""A fault of each kind, planted in compiled code or in what the compiler is told: each is reported as what it is."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import primitives as pr
from perf.ops.attention import Attention
from perf.ops.layer_norm import LayerNorm
from primitives._core.errors import DeviceError
from primitives.testing import KernelError
from primitives.testing._ptx.launching import emulated
from tests.kernels.truth import check_values
from tests.ptx.emulating import few_processors
from tests.ptx.running import run

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803
# pyright: reportArgumentType=false
BF16 = torch.bfloat16
FORWARD = LayerNorm.draw((5, 4096), BF16).call("fwd")
# Rows that are staged in shared memory by asynchronous copies.
BACKWARD = LayerNorm.draw((64, 512), BF16).call("bwd")
ODD = LayerNorm.draw((13, 1031)).call("fwd")
ATTENTION = Attention.draw((1, 1, 100, 64), 100, BF16).call("fwd")


def without(pattern, number=0):
    """Comment one place of PTX out."""

    def edit(kernel, ptx):
        found = [*re.finditer(pattern, ptx, re.MULTILINE)]
        if len(found) <= number:
            return ptx
        return ptx[: found[number].start()] + "//" + ptx[found[number].start() :].lstrip("\t")

    return edit


def with_other(pattern, new, count=0):
    return lambda kernel, ptx: re.sub(pattern, new, ptx, count=count, flags=re.MULTILINE)


BARRIER, WAIT = r"^\tbar\.sync \t0;", r"^\tcp\.async\.wait_group[^;]*;"
# The call, the change, what is reported, and whether the values show it too.
PLANTED = {
    "barrier": (FORWARD, without(BARRIER), {"race"}, False),
    "wait": (BACKWARD, without(WAIT), {"unfinished copy"}, True),
    "wait for one group too few": (
        *(BACKWARD, with_other(r"(wait_group \t)(\d)", lambda m: f"{m[1]}{int(m[2]) + 1}")),
        *({"unfinished copy"}, True),
    ),
    "store to shared memory": (FORWARD, without(r"^\t(@%p\d+ )?st\.shared[^;]*;"), {"undefined value"}, True),
    "zeros of a masked load": (
        *(ODD, with_other(r"^\tmov\.u32 %r\d+, \S+;\n(?=\t@%p\d+ ld\.global)", "")),
        *({"undefined value"}, False),
    ),
    "mask": (ODD, with_other(r"(setp\.\w+\.[us]32 \t%p\d+, %r\d+, )103[01];", r"\g<1>1036;"), {"out of bounds"}, True),
    "offset": (FORWARD, with_other(r"(ld\.global\S* .*\+ )0( \])", r"\g<1>16\2"), {"out of bounds"}, True),
    "fragment": (ATTENTION, with_other(r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"), set(), True),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_reported(name):
    call, edit, kinds, shows_in_values = PLANTED[name]
    with few_processors("sm_80", {}), emulated("sm_80", edit=edit) as seen:
        results = call.results()
    assert kinds <= {fault.kind for fault in seen.faults}, seen.faults
    try:
        check_values(call, results)
    except AssertionError:
        is_wrong = True
    else:
        is_wrong = False
    assert is_wrong == shows_in_values


def test_a_wrong_divisibility_is_reported():
    moved = torch.empty(5 * 4096 + 1, dtype=BF16)[1:].view(5, 4096)
    call = LayerNorm.draw((5, 4096), BF16).change(x=moved.copy_(FORWARD.args[0])).call("fwd")

    first: dict[str, str] = {}
    with few_processors("sm_80", {}), emulated("sm_80", edit=first.setdefault) as seen:
        FORWARD.results()
        assert not seen.faults
        call.results()
    assert "misaligned" in {fault.kind for fault in seen.faults}


@triton.jit
def shift_kernel(x_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at + 1, mask=at + 1 < num, other=0.0), mask=at < num)


@triton.jit
def sum_kernel(parts_ptr, sum_ptr, num, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(sum_ptr, tl.sum(tl.load(parts_ptr + at, mask=at < num, other=0.0), 0))


@triton.jit
def count_kernel(x_ptr, counts_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts_ptr + tl.load(x_ptr + at, mask=at < num, other=0), 1, mask=at < num)


def shifted(x):
    shift_kernel[(8,)](x, x.numel(), BLOCK=128)
    return x


def test_programs_that_depend_on_their_order_are_reported():
    with pytest.raises(KernelError, match="block race") as caught:
        pr.testing.check_kernel(shifted, (torch.arange(1000.0),))
    assert {fault.kind for fault in caught.value.report.faults} == {"block race"}


def test_partial_results_that_nobody_wrote_are_reported():
    def summed(x):
        parts, total = torch.empty(4), torch.empty(1)
        parts[:3] = x
        sum_kernel[(1,)](parts, total, 4, BLOCK=4)
        return total

    # Torch's own writes count for all of a storage.
    assert pr.testing.check_kernel(summed, (torch.ones(3),), raise_on_failure=False).ok

    def never(x):
        parts, total = torch.empty(4), torch.empty(1)
        sum_kernel[(1,)](parts, total, 4, BLOCK=4)
        return total

    (fault,) = pr.testing.check_kernel(never, (torch.ones(3),), raise_on_failure=False).faults
    assert fault.kind == "undefined value"
    assert "parts_ptr" in fault.detail


def test_memory_that_comes_again_is_no_longer_unwritten():
    """`torch.tensor` writes what no dispatch shows, where an empty tensor has just been."""
    places = []

    def summed():
        total = torch.empty(1)
        for _ in range(20):
            places.append(torch.empty(512).data_ptr())
            parts = torch.tensor([1.0] * 512)
            places.append(parts.data_ptr())
            sum_kernel[(1,)](parts, total, 512, BLOCK=512)
        return total

    assert pr.testing.check_kernel(summed, ()).results.item() == 512
    assert set(places[::2]).intersection(places[1::2])


def test_atomic_operations_of_programs_are_none_of_their_order():
    x = torch.randint(0, 7, (300,), dtype=torch.int32)

    def counted(x):
        counts = torch.zeros(7, dtype=torch.int32)
        count_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, counts, x.numel(), BLOCK=64)
        return counts

    for chip in ("sm_80", "sm_90"):
        report = pr.testing.check_kernel(counted, (x,), chip=chip)
        assert torch.equal(report.results, torch.bincount(x, minlength=7).int())
        ((launch),) = report.launches
        assert (launch.grid, launch.loads["x_ptr"].num_bytes) == ((5,), 1200)


def test_neighbors_of_a_view_are_out_of_bounds():
    whole = torch.zeros(300, 2)
    with pytest.raises(KernelError, match="out of bounds"):
        pr.testing.check_kernel(shifted, (whole[:, 0],))


@pytest.mark.parametrize(
    "args, chip, error, message",
    [
        ([torch.ones(4)], "sm_80", TypeError, "args must be a tuple"),
        ((torch.ones(4),), "sm_100", ValueError, "chip must be one of sm_80, sm_90"),
        ((torch.ones(4, device="meta"),), "sm_80", DeviceError, "a tensor on meta"),
        ((torch.ones(4),), "sm_80", RuntimeError, "launched no kernel"),
    ],
)
def test_mistakes_are_named(args, chip, error, message):
    with pytest.raises(error, match=message):
        pr.testing.check_kernel(lambda x: x + 1, args, chip=chip)


def kinds_of(body, threads=64, shared_bytes=256, **options):
    return {
        fault.kind for fault in run(body, [np.zeros(128, np.uint32)], threads, shared_bytes=shared_bytes, **options)[0]
    }


OWN = "shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0;"
NEXT = "xor.b32 %r2, %r1, {}; ld.shared.b32 %r3, [%r2];"
OUT = "mad.wide.u32 %rd0, %r0, 4, %rd0; st.global.b32 [%rd0], %r3;"


@pytest.mark.parametrize(
    "body, kinds",
    [
        # Another warp's word, and another thread's of the warp: a barrier of the warp is enough for that one.
        (OWN + NEXT.format(128) + OUT, {"race"}),
        (OWN + "bar.sync 0;" + NEXT.format(128) + OUT, set()),
        (OWN + NEXT.format(4) + OUT, {"race"}),
        (OWN + "bar.warp.sync -1;" + NEXT.format(4) + OUT, set()),
        (OWN + "bar.warp.sync -1;" + NEXT.format(128) + OUT, {"race"}),
        # What others may still read is written again.
        (OWN + "bar.sync 0;" + NEXT.format(128) + "add.u32 %r0, %r0, 1; st.shared.b32 [%r1], %r0;", {"race"}),
        ("st.shared.b32 [0], %r0;", {"replicas differ"}),
        ("mov.b32 %r4, 7; st.shared.b32 [0], %r4;", set()),
        ("ld.shared.b32 %r3, [4];" + OUT, {"undefined value"}),
        (
            "and.b32 %r1, %r0, 7; shl.b32 %r1, %r1, 4; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r1];" + OUT,
            {"undefined value"},
        ),
        ("st.shared.b32 [256], %r0;", {"out of bounds"}),
        ("shl.b32 %r1, %r0, 1; ld.shared.b32 %r3, [%r1];", {"misaligned"}),
        ("setp.lt.u32 %p1, %r0, 32; @%p1 bra away; bar.sync 0; away:", {"barrier divergence"}),
        # Some threads come back from code that lies behind the barrier.
        (
            "setp.lt.u32 %p1, %r0, 7; @%p1 bra far; on: add.u32 %r0, %r0, 1; bar.sync 0; bra end;"
            "far: add.u32 %r0, %r0, 1; bra on; end:",
            set(),
        ),
        ("setp.lt.u32 %p1, %r0, 7; @%p1 bra away; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; away:", {"divergence"}),
        ("setp.lt.u32 %p1, %r0, 7; @%p1 bra away; bar.warp.sync -1; away:", {"divergence"}),
        ("setp.lt.u32 %p1, %r0, 7; @%p1 add.u32 %r0, %r0, 1; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", set()),
    ],
)
def test_shared_memory_and_barriers(body, kinds):
    assert kinds <= kinds_of(body)
    assert bool(kinds) == bool(kinds_of(body))


def test_copies_land_once_when_their_group_is_waited_for():
    body = """cvta.to.global.u64 %rd1, %rd1; cp.async.ca.shared.global [0], [%rd1], 4; cp.async.commit_group;
    cp.async.ca.shared.global [4], [%rd1+4], 4; cp.async.commit_group; cp.async.wait_group 1; bar.warp.sync -1;
    mov.b32 %r1, 7; st.shared.b32 [0], %r1; {} bar.warp.sync -1; ld.shared.v2.b32 {{%r2, %r3}}, [0];
    st.global.v2.b32 [%rd0], {{%r2, %r3}};"""
    for wait, kinds in (("cp.async.wait_all;", set()), ("", {"unfinished copy", "undefined value"})):
        out = np.zeros(2, np.uint32)
        faults, _ = run(body.format(wait), [out, np.array([5, 6], np.uint32)], threads=32, shared_bytes=16)
        assert {fault.kind for fault in faults} == kinds
        assert wait == "" or out.tolist() == [7, 6]


def test_counts_are_exact():
    """Sectors of requests, bytes with and without repetitions, barriers and instructions."""
    for stride, sectors in ((4, 4), (8, 8), (32, 32)):
        body = f"mad.wide.u32 %rd0, %r0, {stride}, %rd0; ld.global.b32 %r1, [%rd0];"
        _, machine = run(body, [np.zeros(1024, np.uint32)])
        traffic = machine.memory.traffic(False, 32)["p0"]
        assert (traffic.num_bytes, traffic.requests, traffic.sectors) == (128, 1, sectors)
    _, machine = run("mov.b32 %r1, 0; bar.sync 0;", [], threads=64, grid=(3,))
    assert (machine.counts["barriers"], machine.counts["warp_instructions"]) == (3, 3 * 2 * 3)


@pytest.mark.parametrize(
    "stride, access, conflicts",
    [
        *((4, "b32 %r2", 0), (0, "b32 %r2", 0), (8, "b32 %r2", 1), (128, "b32 %r2", 31), (2, "u16 %rs2", 0)),
        # Halves and quarters of a warp after each other.
        *((8, "v2.b32 {%r2, %r3}", 0), (16, "v2.b32 {%r2, %r3}", 2), (16, "v4.b32 {%r2, %r3, %r4, %r5}", 0)),
        (128, "v4.b32 {%r2, %r3, %r4, %r5}", 4 * 7),
    ],
)
def test_words_of_one_bank_are_conflicts(stride, access, conflicts):
    body = f"mul.lo.u32 %r1, %r0, {stride}; ld.shared.{access}, [%r1];"
    _, machine = run(body, [], threads=64, shared_bytes=64 * 128 + 16)
    assert machine.counts["bank_conflicts"] == 2 * conflicts


def test_rows_of_matrices_are_in_conflict_where_they_begin_at_one_bank():
    for stride, conflicts in ((16, 0), (32, 4 * 1), (128, 4 * 7)):
        body = f"mul.lo.u32 %r1, %r0, {stride};"
        body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r1];"
        assert run(body, [], shared_bytes=32 * 128)[1].counts["bank_conflicts"] == conflicts


def test_torch_reads_no_tensor_without_memory_while_launches_are_emulated():
    """A tangent that torch knows to be zero: below a mode a product of it read its null pointer."""
    with emulated("sm_80"):
        assert torch.ops.aten.mul.Scalar(torch._efficientzerotensor((2,)), 2.0).tolist() == [0.0, 0.0]
