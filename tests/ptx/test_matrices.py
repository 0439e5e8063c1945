"""Layouts of fragments and of matrices in shared memory, by the manual's formulas, written out here one by one."""

import numpy as np
import pytest

from tests.ptx.running import run


def bfloat16(values):
    """Small integers as the words that hold them."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def integers(rng, *shape):
    return rng.integers(-8, 9, shape).astype(np.float32)


def registers(first, count):
    return ", ".join(f"%r{first + number}" for number in range(count))


def loads(buffer, first, count, threads="%r0"):
    """Each thread's own `count` words of a buffer."""
    lines = [f"mad.wide.u32 %rd{buffer}, {threads}, {4 * count}, %rd{buffer};"]
    return " ".join([*lines, *(f"ld.global.b32 %r{first + n}, [%rd{buffer}+{4 * n}];" for n in range(count))])


def stores(buffer, first, count):
    lines = [f"mad.wide.u32 %rd{buffer}, %r0, {4 * count}, %rd{buffer};"]
    return " ".join([*lines, *(f"st.global.b32 [%rd{buffer}+{4 * n}], %r{first + n};" for n in range(count))])


# Row and column of element i of a thread, as "Matrix Fragments for mma" has them.
def place_of_a16(group, thread, i):
    return (group if i % 4 < 2 else group + 8), thread * 2 + (i & 1) + (0 if i < 4 else 8)


def place_of_b16(group, thread, i):
    return thread * 2 + (i & 1) + (0 if i < 2 else 8), group


def place_of_c(group, thread, i):
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def place_of_a32(group, thread, i):
    return (group if i in (0, 2) else group + 8), (thread if i in (0, 1) else thread + 4)


def place_of_b32(group, thread, i):
    return (thread if i == 0 else thread + 4), group


def fragment(matrix, place, count):
    """The elements `[lane, count]` of a warp."""
    return np.array([[matrix[place(lane >> 2, lane % 4, i)] for i in range(count)] for lane in range(32)])


@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32"])
def test_mma(kind):
    rng, k = np.random.default_rng(0), 8 if kind == "tf32" else 16
    a, b, c = integers(rng, 16, k), integers(rng, k, 8), integers(rng, 16, 8)
    if kind == "tf32":
        words = [fragment(a, place_of_a32, 4), fragment(b, place_of_b32, 2)]
    else:
        store = bfloat16 if kind == "bf16" else np.float16
        words = [store(fragment(a, place_of_a16, 8)), store(fragment(b, place_of_b16, 4))]
    out = np.zeros((32, 4), np.float32)
    body = f"""{loads(1, 1, 4)} {loads(2, 11, 2)} {loads(3, 21, 4)}
    mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{{registers(21, 4)}}}, {{{registers(1, 4)}}},
      {{{registers(11, 2)}}}, {{{registers(21, 4)}}}; {stores(0, 21, 4)}"""
    faults, _ = run(body, [out, *map(np.ascontiguousarray, words), fragment(c, place_of_c, 4).astype(np.float32)])
    assert not faults
    np.testing.assert_array_equal(out, fragment(a @ b + c, place_of_c, 4))


# Threads fill shared memory, two bytes each at a time, before anything reads it.
FILL = """mul.lo.u32 %r90, %r0, 2; cvt.u64.u32 %rd7, %r90; add.u64 %rd7, %rd1, %rd7; mov.u32 %r91, 0;
again: ld.global.b16 %rs1, [%rd7]; st.shared.b16 [%r90], %rs1; add.u32 %r90, %r90, {step}; add.u64 %rd7, %rd7, {step};
add.u32 %r91, %r91, 1; setp.lt.u32 %p1, %r91, {times}; @%p1 bra again; bar.sync 0;"""


@pytest.mark.parametrize("is_transposed", [False, True])
def test_ldmatrix_and_stmatrix(is_transposed):
    """Thread `8 m + i` names row i of matrix m; a thread gets elements 2 t and 2 t + 1 of row g of each."""
    values, out = np.arange(256, dtype=np.uint16).reshape(4, 8, 8), np.zeros((32, 4, 2), np.uint16)
    copied, trans = np.zeros(256, np.uint16), ".trans" * is_transposed
    body = f"""{FILL.format(step=64, times=8)} shl.b32 %r1, %r0, 4;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{registers(2, 4)}}}, [%r1]; {stores(0, 2, 4)}
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1+512], {{{registers(2, 4)}}}; bar.sync 0;
    ld.shared.v4.b32 {{{registers(6, 4)}}}, [%r1+512]; shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd7, %r1;
    add.u64 %rd2, %rd2, %rd7; st.global.v4.b32 [%rd2], {{{registers(6, 4)}}};"""
    faults, _ = run(body, [out, values, copied], shared_bytes=1024)
    assert not faults
    for lane in range(32):
        for matrix in range(4):
            turned = values[matrix].T if is_transposed else values[matrix]
            assert out[lane, matrix].tolist() == turned[lane >> 2, 2 * (lane % 4) : 2 * (lane % 4) + 2].tolist()
    np.testing.assert_array_equal(copied, values.ravel())


def test_stmatrix_alone_is_seen_in_halves_of_words():
    out = np.zeros((32, 1), np.uint32)
    faults, _ = run(
        f"""shl.b32 %r1, %r0, 4; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {{%r0}}; bar.sync 0;
        shl.b32 %r2, %r0, 2; ld.shared.b32 %r3, [%r2]; {stores(0, 3, 1)}""",
        [out],
        shared_bytes=512,
    )
    assert not faults
    assert out.ravel().tolist() == list(range(32))


# Elements of 16 bits in shared memory by canonical layouts: T is 8 of them, 16 bytes. The formulas are in units of
# elements: `k_major(row, k)`, and `mn_major(row, k)` where rows are adjacent.
def k_major(row, k, width, leading, stride):
    """((8, m), (T, 2 k)) : ((width T, stride), (1, T)), or without a swizzle (1, leading)."""
    if width == 1:
        return row % 8 * 8 + row // 8 * stride + k % 8 + k // 8 * leading
    return row % 8 * width * 8 + row // 8 * stride + k


def mn_major(row, k, width, leading, stride):
    """((T, width, m), (8, k)) : ((1, T, leading), (width T, stride)); without a swizzle the strides change places."""
    if width == 1:
        leading, stride = stride, leading
    return row % (8 * width) + row // (8 * width) * leading + k % 8 * 8 * width + k // 8 * stride


def swizzled(byte, width):
    """Swizzle<log2(width), 4, 3>."""
    return byte ^ (byte >> 3 & (width - 1) << 4)


def descriptor(start, leading, stride, width):
    mode = {1: 0, 8: 1, 4: 2, 2: 3}[width]
    return start >> 4 | leading * 2 >> 4 << 16 | stride * 2 >> 4 << 32 | mode << 62


def in_memory(memory, matrix, start, width, is_turned):
    """Put `[rows, k]` where a descriptor finds it, which is returned."""
    rows, inner = matrix.shape
    layout = mn_major if is_turned else k_major
    if width == 1:
        leading, stride = (64 * (rows // 8), 64) if is_turned else (64, 128)
    else:
        leading, stride = (64 * width * (inner // 8), 64 * width) if is_turned else (8, 64 * width)
    for row in range(rows):
        for k in range(inner):
            at = layout(row, k, width, leading, stride)
            memory[start // 2 + swizzled(2 * at, width) // 2] = bfloat16(matrix[row, k])
    return descriptor(start, leading, stride, width)


@pytest.mark.parametrize("is_turned", [False, True], ids=["k", "mn"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("left", ["shared", "registers"])
def test_wgmma(left, width, is_turned):
    rng = np.random.default_rng(0)
    a, b, c = integers(rng, 64, 16), integers(rng, 32, 16), integers(rng, 64, 32)
    memory = np.zeros(16384, np.uint16)
    words = in_memory(memory, a, 0, width, is_turned), in_memory(memory, b, 16384, width, is_turned)

    def of_threads(matrix, place, count):
        return np.concatenate([fragment(matrix[16 * warp : 16 * warp + 16], place, count) for warp in range(4)])

    # Sixteen columns after another are as the result of a product of 16 x 8 has them.
    def place_of_d(group, thread, i):
        row, col = place_of_c(group, thread, i % 4)
        return row, col + 8 * (i // 4)

    out, added = np.zeros((128, 16), np.float32), of_threads(c, place_of_d, 16).astype(np.float32)
    packed = bfloat16(of_threads(a, place_of_a16, 8))
    first, turns = "%rd5", "1, 1, {0}, {0}"
    if left == "registers":
        first, turns = f"{{{registers(40, 4)}}}", "1, 1, {0}"
    product = f"""wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{registers(1, 16)}}}, {first}, %rd6, %p1,
      {turns.format(int(is_turned))}; wgmma.commit_group.sync.aligned;"""
    given = [out, memory, added, packed]

    def faults_of(products):
        body = f"""{FILL.format(step=256, times=128)} {loads(2, 1, 16)} {loads(3, 40, 4)} setp.lt.u32 %p2, %r0, 32;
        mov.b64 %rd5, {words[0]}; mov.b64 %rd6, {words[1]}; mov.pred %p1, -1; fence.proxy.async.shared::cta;
        wgmma.fence.sync.aligned; {products} away: {stores(0, 1, 16)}"""
        return {each.kind for each in run(body, given, 128, shared_bytes=32768)[0]}

    wait = "wgmma.wait_group.sync.aligned {};".format
    assert not faults_of(product + wait(0))
    np.testing.assert_array_equal(out, of_threads(a @ b.T + c, place_of_d, 16))
    if (left, width) == ("shared", 8):
        # Whoever looks before the wait, writes what is still read, or leaves a warp out, is found out.
        zero = "mov.b32 %r50, 0; st.shared.b32 [0], %r50;"
        assert faults_of(product) == {"undefined value"}
        assert "unfinished product" in faults_of(product + zero + wait(0))
        assert "divergence" in faults_of("@%p2 bra away;" + product)
        assert not faults_of(product + wait(0) + "bar.sync 0;" + zero)
        # One that goes on with the accumulators needs no wait, and is one to wait for.
        assert faults_of(product * 2 + wait(1)) == {"undefined value"}
        assert not faults_of(product * 2 + wait(0))
        np.testing.assert_array_equal(out, of_threads(2 * a @ b.T + c, place_of_d, 16))
