"""The time model against figures worked out by hand, its page, and that of wrong derivatives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from perf import model, peers, wrong_derivatives
from perf.__main__ import DOCS, main
from perf.machine_code import stalls
from perf.machine_code.listing import listings
from perf.machine_code.table import Row
from perf.ops.workload import Workload
from triton_kernels import launch

ROWS = Workload("by hand", "layer_norm", (8192, 4096), affine=False)
LOGITS = Workload("by hand", "log_softmax", (8192, 4096))
CHANNELS = Workload("by hand", "batch_norm", (64, 256, 56, 56), affine=False)
L2_BYTES = 62914560
# 264 partial rows of two float32 sums, written and read: 17 MB, in passes.
PARTIAL = 2 * 264 * 2 * 4096 * 4 / ROWS.pass_bytes
# 132 of one sum over twice as many columns.
LONG_PARTIAL = PARTIAL / 4


@pytest.fixture(scope="module")
def device():
    """An H200 that copies a byte in a second and launches in no time."""
    none, one = (model.Value(value, False, "by hand") for value in (0.0, 1.0))
    return dataclasses.replace(model.read_device("h200"), launch_seconds=none, copy_bytes_per_second=one)


@pytest.mark.parametrize(
    "workload, mode, floor, passes, launches",
    [
        (ROWS, "forward", 2, 2, 1),
        (ROWS, "jvp", 4, 4, 1),
        (ROWS, "hvp", 4 + 3 + 4, 4 + 3 + 4, 3),
        (LOGITS, "jvp", 4, 4, 1),
        (CHANNELS, "jvp", 4, 6, 3),
        (dataclasses.replace(ROWS, affine=True), "backward", 3, 3 + PARTIAL, 2),
        # A cotangent of y goes on to x through the backward.
        (LOGITS, "double_backward", 3 + 2 + 3, 3 + 2 + 3, 2),
        (CHANNELS, "forward", 2, 3, 3),
        (CHANNELS, "double_backward", 5, 8, 3),
        # Rows of the longest that are held: of two tensors of log-softmax, and beside sums of second order.
        (dataclasses.replace(LOGITS, shape=(4096, 32000)), "backward", 3, 3, 1),
        (dataclasses.replace(ROWS, shape=(8192, 8192), affine=True), "double_backward", 5, 5 + LONG_PARTIAL, 2),
    ],
    ids=str,
)
def test_passes_and_launches(workload, mode, floor, passes, launches, device):
    found = model.predict(workload, mode, device)
    assert found.floor_us == pytest.approx(floor * workload.pass_bytes * 1e6, rel=0.005)
    assert found.memory_us == pytest.approx(passes * workload.pass_bytes * 1e6, rel=0.005)
    slow = model.predict(workload, mode, dataclasses.replace(device, launch_seconds=model.Value(1.0, False, "by hand")))
    assert slow.memory_us - found.memory_us == pytest.approx(launches * 1e6)


@pytest.mark.parametrize(
    "workload, served",
    [
        # 264 rows of 100 KB at a time are 27 MB, which the cache holds; of 132 rows of 512 KiB it holds 62.9 of 69 MB.
        (Workload("", "log_softmax", (4096, 50257)), 4096 * 50257 * 2),
        (Workload("", "log_softmax", (4096, 262144)), L2_BYTES * 4096 / 132),
        # Rows that programs share are read again by a second launch, as channels are, behind all of the first.
        (Workload("", "log_softmax", (200, 262144)), L2_BYTES),
        (CHANNELS, L2_BYTES),
    ],
    ids=str,
)
def test_the_cache_serves_what_it_holds(workload, served, device):
    found = model.predict(workload, "forward", device)
    assert found.memory_us - found.cached_us == pytest.approx(served * 1e6, rel=0.01)


@pytest.mark.parametrize("mode, products", [("forward", 2), ("jvp", 2 + 5), ("hvp", 2 + 5 + 7 + 15)])
def test_attention_takes_as_long_as_its_bytes_or_its_products_whichever_is_longer(mode, products, device):
    # Tiles of 72 wide heads are 128 wide.
    workload, pairs = Workload("by hand", "attention", (2, 3, 256, 72)), 2 * 3 * 256 * 256
    one = model.Value(1.0, False, "by hand")
    found = model.predict(workload, mode, dataclasses.replace(device, matmul_flops_per_second=one))
    assert found.floor_us == pytest.approx(products * 2 * pairs * 72 * 1e6)
    assert found.memory_us == pytest.approx(products * 2 * pairs * 128 * 1e6)
    bytes_alone = model.predict(workload, mode, device)
    assert bytes_alone.memory_us == pytest.approx(bytes_alone.cost.bytes_moved * 1e6)


@pytest.mark.parametrize(
    "code, binds, seconds",
    [
        # 63 programs of 8 warps for the busiest of 132 processors. Of the loop the first program has no step.
        (
            "0:1:1 r0 i600 b2 l64 c4000; program_x*2//programs_x:(program_x+1)*2//programs_x:1 r0 i400 b0 l0 c1000",
            "issue",
            63 * 8 * 1000 / 4 / 0.5,
        ),
        # Eight programs at a time on each.
        ("0:1:1 r0 i90 b2 l64 c4000; 0:num_rows-8190:1 r0 i5 b0 l0 c500", "latency", 8192 / 132 / 8 * (4000 + 2 * 500)),
        ("0:1:1 r0 i1 b2 l64 c1", "bytes", 0),
    ],
)
def test_the_longest_of_three_terms_is_predicted_and_named(code, binds, seconds, device, monkeypatch):
    (_, launches), *_ = model.steps_of(ROWS, "forward", launch.CHIPS["sm_90"])
    keys = [one.key for one in launches]
    row = Row("by hand", "by hand", 8, 32, 255, 0, 0, 0, "", "", 0, code, "by hand")
    monkeypatch.setattr(model, "_machine_code", lambda chip: dict.fromkeys(keys, row))
    one, half, slow = (model.Value(value, False, "by hand") for value in (1.0, 0.5, 1e5))
    changed = dataclasses.replace(device, clock_hertz=one, sustained_share=half, copy_bytes_per_second=slow)
    found = model.predict(ROWS, "forward", changed)
    assert found.binds == binds
    assert found.predicted_us == pytest.approx(max(1e6 * seconds, found.cached_us))
    # A step without machine code is predicted by its bytes.
    monkeypatch.setattr(model, "_machine_code", lambda chip: {})
    found = model.predict(ROWS, "forward", changed)
    assert (found.binds, found.issue_us, found.predicted_us) == ("bytes", None, found.cached_us)


def test_the_page_of_predictions_is_what_the_model_says(capsys):
    assert main(["predict"]) == 0
    assert (DOCS / "predictions_h200.md").read_text() == capsys.readouterr().out, "run `python -m perf predict --write`"


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


def test_the_page_of_peers_is_of_these_kernels():
    page = (DOCS / "peers_sm_90.md").read_text()
    if f"Triton {triton.__version__}" not in page:
        pytest.skip("the page is of another release of Triton")
    assert peers.key_of_ours() in page, "the page of peers is out of date: run `python -m perf peers --write`"


def test_the_page_of_peers_says_what_makes_up_for_each_figure_that_is_worse():
    lost = []
    steps = list(peers.read_rows((DOCS / "peers_sm_90.md").read_text()))
    assert {name.split()[0] for name, _, _ in steps} == set(peers.MODES)
    for name, rows, said in steps:
        assert set(rows) >= {"ours", "Inductor"}, name
        assert ", ".join(peers.judge(**rows)) == said, name
        lost += [name] if peers.LOSS in said else []
    known = {each for name in lost for each in peers.KNOWN_LOSSES if name.startswith(each)}
    assert known == set(peers.KNOWN_LOSSES)
    assert all(name.startswith(tuple(known)) for name in lost), lost
    _, listed = (DOCS / "peers_sm_90.md").read_text().split("## Where nothing makes up for it")
    assert [line for line in listed.splitlines() if line.startswith("- ")] == [
        f"- {name}: {why}." for name, why in peers.KNOWN_LOSSES.items()
    ]


@pytest.mark.parametrize("figure", [name for name, share in peers.FIGURES.items() if share])
def test_a_figure_that_nothing_makes_up_for_is_a_loss(figure):
    peer = dict.fromkeys(peers.FIGURES, 10.0)
    slower = {**peer, "issue us": 20.0, "under way": 9.0}
    worse = {**slower, figure: 5.0 if figure == "access" else 20.0}
    lost = [f"{name} ({peers.LOSS})" for name in (figure, "time")]
    assert peers.judge(ours=worse, Inductor=peer) == lost
    # A slower peer does not excuse what another one does better.
    assert peers.LOSS in peers.judge(ours=worse, Inductor=peer, Liger={**peer, "waits us": 90.0})[0]
    assert peers.judge(ours=slower, Inductor=peer) == lost[1:]
    assert peers.judge(ours=peer, Inductor=peer) == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_page_of_wrong_derivatives_says_of_each_nesting_who_is_right(monkeypatch):
    monkeypatch.setattr(wrong_derivatives, "MAX_ORDER", 2)
    page = (DOCS.parent / "reference" / "wrong_derivatives.md").read_text()
    _, *tables = page.split("\n## ")
    assert len(tables) == len(wrong_derivatives.OPERATIONS), "run: python -m perf.wrong_derivatives"
    for name, table in zip(wrong_derivatives.OPERATIONS, tables, strict=True):
        cells = {
            row.split(" | ")[0].strip("| `"): row.split(" | ")[1:] for row in table.splitlines() if row[:3] == "| `"
        }
        counts = [sum("**" not in row[column] for row in cells.values()) for column in range(3)]
        assert f"| {name} | {len(cells)} | {' | '.join(map(str, counts))} |" in page
        # Some are measured again.
        for nesting, errors in wrong_derivatives.measure(name) if name == wrong_derivatives.FUSED else ():
            said = ["**" not in cell for cell in cells["(".join(nesting) + ")" * (len(nesting) - 1)]]
            found = [wrong_derivatives.is_right(error) for error in errors]
            # Of torch the page says which version it is about.
            first = f"torch {torch.__version__.split('+')[0]}," not in page
            assert found[first:] == said[first:], (name, nesting)
