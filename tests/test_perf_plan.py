"""The plan of a perf run: what is measured, in which order, and whether it fits the time by what is assumed."""

from __future__ import annotations

import pytest

from perf.__main__ import main
from perf.suite import driver, estimate
from perf.suite.plan import GPU_PROVIDERS, OptionError, Options, compile_items, find, make_plan, suite
from perf.suite.providers import NAMES
from perf.workloads import BASIC_MODES, GPU_WORKLOADS, KERNEL_MODES, Workload


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_fit_the_time_of_a_run(device, quick):
    made = make_plan(Options(device, quick=quick), dict.fromkeys(GPU_PROVIDERS))
    total = 120 if quick else 540
    assert made["options"]["seconds"] + driver.GRACE_SECONDS < total
    assert sum(item["seconds"] for item in made["units"]) + made["compile_seconds"] < made["options"]["seconds"]
    assert [item["id"] for item in made["units"]] == sorted({item["id"] for item in made["units"]})
    assert all(find(item["workload"], device).key == item["workload"] for item in made["units"])


def test_what_matters_most_comes_first():
    made = make_plan(Options("cuda"), dict.fromkeys(GPU_PROVIDERS))
    found = [find(item["workload"], "cuda") for item in made["units"]]
    ranks = [0 if w.quick else 1 if not isinstance(w, Workload) or w.pass_bytes >= 32e6 else 2 for w in found]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1, 2}
    assert {(w.key, mode) for w, mode in suite("cuda")} == {(u["workload"], u["mode"]) for u in made["units"]}
    names = [name for _, name in compile_items(made)]
    assert len(names) == sum(len(item["compiling"]) for item in made["units"])
    # Whoever tunes for long, tunes last, so that nobody else is skipped for it.
    first = names.index("torch.compile max-autotune")
    assert set(names[first:]) == {"torch.compile max-autotune"}


@pytest.mark.parametrize("quick", [False, True])
def test_the_plan_of_a_gpu_fits_its_time_by_what_is_assumed(quick):
    without = dict.fromkeys(GPU_PROVIDERS, "not installed")
    usual = without | dict.fromkeys(("primitives", "torch", "torch.compile", "torch.compile max-autotune"))
    made = make_plan(Options("cuda", quick=quick), usual)
    found = estimate.estimate(made, 14, 1)
    assert found.fits, str(found)
    assert "all of it should fit" in str(found)
    # A machine with few cores is told so.
    small = estimate.estimate(made, 2, 1)
    assert small.compile > found.compile
    assert "SKIPPED" in str(small)
    # So is who asks for everything at every shape.
    modes = ("forward", "backward", "jvp", "hvp", "double_backward", "training_step")
    everything = make_plan(Options("cuda", modes=modes, providers=tuple(usual)), usual)
    assert not estimate.estimate(everything, 14, 1).fits
    assert estimate.estimate(made, 14, 4).measure < found.measure / 2


def test_a_full_run_has_every_workload_and_all_modes_of_some():
    made = make_plan(Options("cuda"), dict.fromkeys(GPU_PROVIDERS))
    by_workload = {}
    for item in made["units"]:
        by_workload.setdefault(item["workload"], []).append(item["mode"])
    for workload in GPU_WORKLOADS:
        whole = workload.quick or workload.whole
        assert by_workload[workload.key] == list(workload.modes if whole else BASIC_MODES)
    assert {w.op for w in GPU_WORKLOADS if w.telling} == {"layer_norm", "log_softmax", "batch_norm"}
    tuned = [unit for unit, name in compile_items(made) if name == "torch.compile max-autotune"]
    assert {item["mode"] for item in tuned} == {"forward", "backward"}
    assert 0 < len(tuned) < 10
    for item in made["units"]:
        assert ("torch.compile max-autotune" in item["left_out"]) == (item not in tuned)
        assert ("liger" in item["compiling"]) == (item["op"] == "layer_norm")
    # Who asks for a provider, a mode or a workload gets it.
    asked = make_plan(Options("cuda", providers=("torch.compile max-autotune",)), dict.fromkeys(GPU_PROVIDERS))
    assert len(compile_items(asked)) == len(asked["units"])
    everywhere = make_plan(Options("cuda", modes=("jvp",)), dict.fromkeys(GPU_PROVIDERS))
    assert len(everywhere["units"]) == len(GPU_WORKLOADS)
    narrow = make_plan(Options("cuda", only=("GPT-2 XL",)), dict.fromkeys(GPU_PROVIDERS))
    assert [item["mode"] for item in narrow["units"]] == list(KERNEL_MODES)


def test_the_documented_plan_is_the_plan():
    page = (driver.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    names = ("primitives", "torch", "torch.compile", "torch.compile max-autotune")
    known = dict.fromkeys(GPU_PROVIDERS, "not installed") | dict.fromkeys(names)
    made = make_plan(Options("cuda"), known)
    counts = estimate.summary(made).split("\nforward, backward:")[0]
    assert f"{counts}\n" in page, counts
    for options in (Options("cuda", quick=True), Options("cpu"), Options("cpu", quick=True)):
        line = estimate.summary(make_plan(options, known)).splitlines()[0]
        assert line in page, line
    assert str(estimate.estimate(made, 14, 1)) in page, str(estimate.estimate(made, 14, 1))


def test_a_run_can_be_narrowed_down_and_says_what_it_does_not_know():
    everything = dict.fromkeys(GPU_PROVIDERS)
    made = make_plan(Options("cuda", only=("batchnorm1d",), modes=("jvp",), providers=("torch",)), everything)
    assert [(item["name"], item["mode"]) for item in made["units"]] == [("BatchNorm1d", "jvp")]
    assert made["providers"] == ["torch"]
    twice = make_plan(Options("cpu", modes=("jvp", "jvp"), providers=("torch", "torch")), everything)
    assert twice["providers"] == ["torch"]
    assert len({(item["workload"], item["mode"]) for item in twice["units"]}) == len(twice["units"])
    for wrong in ({"modes": ("sideways",)}, {"providers": ("nobody",)}, {"only": ("no such words",)}):
        with pytest.raises(OptionError, match=next(iter(wrong.values()))[0]):
            make_plan(Options("cuda", **wrong), everything)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--providers", "primitives", "tortch"), f"--providers must be among {', '.join(NAMES)}, got tortch."),
        (("--seconds", "0"), "--seconds must be a finite number above 0, got 0."),
        (("--seconds=-5",), "--seconds must be a finite number above 0, got -5."),
        (("--seconds", "nan"), "--seconds must be a finite number above 0, got nan."),
        (("--seconds", "inf"), "--seconds must be a finite number above 0, got inf."),
        (("--workers=-3",), "--workers must be at least 1, got -3."),
        (("--workers", "0"), "--workers must be at least 1, got 0."),
    ],
)
@pytest.mark.parametrize("plan", [("--plan",), ()])
def test_options_that_mean_nothing_are_refused_before_anything_else(tmp_path, capsys, plan, arguments, said):
    out = tmp_path / "folder" / "result.json"
    assert main(["run", "--device", "cpu", "--out", str(out), *plan, *arguments]) == 2
    assert capsys.readouterr().err == f"{said}\n"
    assert not out.parent.exists()


def test_every_provider_can_be_asked_for():
    assert set(GPU_PROVIDERS) == set(NAMES)
