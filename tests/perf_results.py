"""Made-up results of a GPU, as the tests of the perf suite compare and report them."""

from __future__ import annotations

from perf.suite.bytes import passes_of
from perf.suite.plan import GPU_PROVIDERS, Options, make_plan
from perf.suite.results import CANNOT, OK, SCHEMA, WRONG, row_for

# Times in units of that of a copy of the minimum of bytes.
COPIES = {"primitives": 1.06, "torch": 1.9, "torch.compile": 1.2, "liger": 1.1}
COPY_GBPS = 4000.0
MINIMUM_BYTES = 134_000_000


def spread(median, width=0.01):
    return {"median": median, "p20": median * (1 - width), "p80": median * (1 + width), "samples": 20}


def make_row(unit, provider, copies, **values):
    copy_us = MINIMUM_BYTES / COPY_GBPS * 1e-3
    full = 2 if unit["mode"] == "training_step" else passes_of(unit["op"], unit["mode"]).full
    # Batch norm makes one pass more here, as its forward does.
    made = MINIMUM_BYTES * (full + 1) / full if unit["op"] == "batch_norm" else MINIMUM_BYTES
    timed = {
        "device_us": spread(copies * copy_us),
        "call_us": spread(copies * copy_us + 10),
        "vs_torch_device": spread(copies / COPIES["torch"]) if provider != "torch" else None,
        "minimum_bytes": MINIMUM_BYTES,
        "copy_gbps": COPY_GBPS,
        "gbps": COPY_GBPS / copies,
        "fraction_of_copy": 1 / copies,
        "kernel_bytes": made if provider == "primitives" else None,
        "kernel_fraction": made / MINIMUM_BYTES / copies if provider == "primitives" else None,
        "error": 1e-3,
        "tolerance": 4e-2,
        "gpu": "0",
        "peak_bytes": 67_000_000,
        "launches": 1,
    }
    if unit["mode"] == "training_step":
        timed |= dict.fromkeys(("minimum_bytes", "gbps", "fraction_of_copy", "kernel_bytes", "kernel_fraction"))
    return row_for(unit, provider, OK, **{**timed, **values})


def gpu_result(modes=("forward", "jvp"), slower=1.0, quick=True):
    """A run on a GPU; `slower` multiplies the times of this package."""
    everybody = dict.fromkeys(GPU_PROVIDERS)
    plan = make_plan(Options("cuda", quick=quick, modes=modes), everybody)
    missing = {name: f"ModuleNotFoundError: no {name}" for name in everybody if name not in COPIES}
    rows = []
    for number, unit in enumerate(plan["units"]):
        wobble = 1 + 0.001 * (number % 20)
        for name, copies in COPIES.items():
            if name == "liger" and unit["mode"] == "jvp":
                message = "RuntimeError: liger | has no JVP"
                rows.append(row_for(unit, name, CANNOT, message))
            elif name == "torch" and unit["mode"] == "jvp" and unit["op"] == "log_softmax":
                rows.append(
                    row_for(unit, name, WRONG, "error 9.0e-01, at most 4e-02 is right", error=0.9, tolerance=4e-2)
                )
            else:
                rows.append(make_row(unit, name, copies * wobble * (slower if name == "primitives" else 1.0)))
    return {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00+00:00",
        "options": plan["options"],
        "complete": True,
        "package": {"version": "1.0", "revision": "0123456789abcdef", "dirty": True},
        "seconds": {"total": 100.0, "compile": 40.0},
        "device": {
            "type": "cuda",
            "name": "Imaginary GPU",
            "capability": "9.0",
            "processors": 132,
            "l2_bytes": 60 * 2**20,
            "gpus": ["0"],
        },
        "environment": {"python": "3.12", "packages": {"torch": "2.11"}, "threads": 1, "cores": 16, "processor": "CPU"},
        "clocks": {
            "0": [
                {"driver_version": "1", "clocks.sm": clock, "clocks.mem": "3201 MHz"}
                for clock in ("345 MHz", "1980 MHz")
            ]
        },
        "providers": dict.fromkeys(COPIES) | missing,
        "calibration": {"0": {"512000000": {"copy_gbps": COPY_GBPS}}},
        "overhead": None,
        "rows": rows,
    }


def cpu_result(ours=0.9):
    """A full run on a CPU, in which this package takes `ours` of torch's time; torch is wrong in one case."""
    plan = make_plan(Options("cpu"), dict.fromkeys(GPU_PROVIDERS))
    rows = []
    for unit in plan["units"]:
        torch_is_wrong = unit["dtype"] == "bfloat16" and unit["mode"] == "forward_backward"
        over = None if torch_is_wrong else spread(ours)
        rows.append(row_for(unit, "primitives", OK, call_us=spread(10.0), vs_torch_call=over, error=1e-7))
        if torch_is_wrong:
            rows.append(row_for(unit, "torch", WRONG, "error 9.2e-02", error=0.092, tolerance=4e-2))
        else:
            rows.append(row_for(unit, "torch", OK, call_us=spread(10.0 / ours), error=1e-7))
    modes = {
        "calls": {"ratio": 0.9, "ratio_p20": 0.8, "ratio_p80": 1.0, "limit": 1.0},
        "backward": {"ratio": 1.05, "ratio_p20": 1.0, "ratio_p80": 1.1, "limit": 1.0},
    }
    return {
        **gpu_result(),
        "options": plan["options"],
        "device": {"type": "cpu", "name": "Imaginary CPU"},
        "providers": dict.fromkeys(("primitives", "torch")),
        "clocks": {},
        "calibration": {},
        "overhead": {"modes": modes},
        "rows": rows,
    }
