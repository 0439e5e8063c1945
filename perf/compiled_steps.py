"""Training steps with derivatives in the loss: eager torch, `primitives.compile`, `torch.compile` and `jax.jit`.

One thread, all of them in one process and in turns, the least time of each; on the CPU first calls in processes of
their own, with an empty folder for Inductor's files. `torch.compile` must take the loss whole, and JAX takes part where
it is installed. `python -m perf.compiled_steps NAME ours` is such a process: it prints the seconds of a first call,
with Inductor's files where `TORCHINDUCTOR_CACHE_DIR` says.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import primitives as pr
from perf.compiled_losses import CASES, Case
from perf.measuring import in_turns, once, peak, saved_bytes
from perf.pages import table

__all__ = ["CASES", "Case", "cells", "first_call", "means", "measure", "results", "steps", "write"]

CONTESTANTS = ("eager", "ours", "torch.compile", "jax.jit")
# On a GPU the launches of small steps take longer than the kernels: Inductor's mode that repeats them as CUDA graphs.
GRAPHS = ", graphs"


def _step(params: Sequence[nn.Parameter], loss: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Loss and gradients, of a list of parameters, as an optimizer holds one."""
    for p in params:
        p.grad = None
    value = loss(x)
    value.backward()
    return [value, *(p.grad for p in params if p.grad is not None)]


def steps(case: Case, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    """The step by contestant; nothing is compiled yet."""
    torch.manual_seed(0)
    net, x = case.net().to(device), torch.rand(case.shape).to(device)
    whole = functools.partial(torch.compile, fullgraph=True)
    ways: dict[str, Callable[..., Any]] = {"eager": lambda f: f, "ours": pr.compile, "torch.compile": whole}
    if device == "cuda":
        compilers = {"ours": pr.compile, "torch.compile": whole}
        ways |= {name + GRAPHS: functools.partial(way, mode="reduce-overhead") for name, way in compilers.items()}
    loss, params = functools.partial(case.loss, net), [*net.parameters()]
    found: dict[str, Any] = {name: functools.partial(_step, params, way(loss), x) for name, way in ways.items()}
    if importlib.util.find_spec("jax") is not None:
        from perf.compiled_in_jax import jax_step

        found["jax.jit"] = jax_step(case, device)
    return {name: step for name, step in found.items() if step is not None}


def saved(step: Any) -> int:
    """Bytes that the graph of a loss keeps for the backward pass, besides weights and data."""
    params, loss, x = step.args
    return saved_bytes(loss(x), (*params, x))


def first_calls(case: Case, names: Sequence[str]) -> dict[str, float]:
    """Seconds of the first step in a fresh process, for each contestant, and in one more with Inductor's files."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (*names, *(f"{name} again" for name in names if name != "jax.jit")):
            contestant = name.removesuffix(" again")
            place = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, contestant))}
            command = [sys.executable, "-m", "perf.compiled_steps", case.name, contestant]
            ended = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=True)
            found[name] = float(ended.stdout.split()[-1])
    return found


def first_call(name: str, contestant: str) -> float:
    """Seconds of a first step, here and now, after one in eager torch."""
    torch.set_num_threads(1)
    found = steps(next(case for case in CASES if case.name == name))
    found["eager"]()
    start = time.perf_counter()
    found[contestant]()
    return time.perf_counter() - start


def measure(case: Case, device: str, seconds: float = 3.0) -> dict[str, Any]:
    """By contestant: milliseconds, seconds of first calls, bytes; and the largest relative difference from eager."""
    runs, failed = steps(case, device), []
    truth = [y.clone() for y in runs["eager"]()]
    pairs = zip(truth, runs["ours"](), strict=True)
    difference = max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
    for name in [*runs][2:]:
        try:
            runs[name]()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:70]}")
            del runs[name]
    taken, plain = in_turns({name: functools.partial(once, run) for name, run in runs.items()}, seconds), {}
    times = {name: 1e3 * min(found) for name, found in taken.items()}
    if device == "cuda":
        return {"case": case.name, "ms": times, "failed": failed, "difference": difference}
    if case.plain is not None:
        plain = {"plain": saved(steps(case._replace(loss=case.plain))["eager"])}
    return {
        "case": case.name,
        "ms": times,
        "first": first_calls(case, [name for name in runs if name != "eager"]),
        "failed": failed,
        "difference": difference,
        "saved": {name: saved(runs[name]) for name in ("eager", "ours")} | plain,
        "peak": {name: peak(run) for name, run in runs.items() if name != "jax.jit"},
    }


def contestants(results: Iterable[dict[str, Any]]) -> list[str]:
    """Who has a time of one of these steps at least."""
    timed = {name for found in results for name in found["ms"]}
    return [name for each in CONTESTANTS for name in (each, each + GRAPHS) if name in timed]


def cells(found: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The row of a step: its times, by these contestants, and how far off ours is."""
    ms = found["ms"]
    times = [f"{ms[name]:.2f}" if name in ms else "-" for name in names]
    return [found["case"], *times, f"{ms['ours'] / ms['eager']:.2f}", f"{found['difference']:.0e}"]


def _besides(found: dict[str, Any]) -> list[str]:
    """The row of a step: its first calls, and memory."""
    first = found["first"]
    asked = CONTESTANTS[1:], [f"{name} again" for name in CONTESTANTS[1:3]]
    seconds = [" / ".join(f"{first[name]:.1f}" if name in first else "-" for name in names) for names in asked]
    kinds = [" / ".join(f"{n / 1e3:.0f}" for n in found[kind].values()) for kind in ("saved", "peak")]
    return [found["case"], *seconds, *kinds]


def means(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What ours takes of others' times and bytes, in the geometric mean and at most."""
    ratios: dict[str, list[float]] = {}
    for found in results:
        first, kept = (found.get(kind, {}) for kind in ("first", "saved"))
        pairs = {name: (found["ms"], name) for name in found["ms"] if name != "ours"}
        pairs |= {f"{name}, first calls": (first, name) for name in first if name == "torch.compile"}
        pairs |= {"eager, saved bytes": (kept, "eager")} if kept else {}
        for what, (of, name) in pairs.items():
            ratios.setdefault(what, []).append(of["ours"] / of[name])
    for what, values in ratios.items():
        mean = statistics.geometric_mean(values)
        yield f"- ours / {what}: {mean:.2f} in the geometric mean of {len(values)}, {max(values):.2f} at most"


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Times, one line for each step; on the CPU first calls and memory; and the means."""
    names = contestants(results)
    heads = ["step", "eager, ms", *names[1:], "ours / eager", "difference"]
    parts = [table(heads, (cells(found, names) for found in results))]
    if any("first" in found for found in results):
        heads = ["step", "first call, s", "again, s", "saved, kB", "peak, kB"]
        parts.append(table(heads, map(_besides, results)))
    return "\n\n".join([*parts, "\n".join(means(results))])


def results(only: Sequence[str] = (), device: str = "cpu") -> Iterator[dict[str, Any]]:
    """What `measure` finds for each step, or for those whose name contains one of these words."""
    torch.set_num_threads(1)
    for case in CASES:
        if not only or any(word in case.name for word in only):
            yield measure(case, device)


def write(found: Sequence[dict[str, Any]], folder: Path, device: str = "cpu") -> None:
    """The page of the docs for a device with its picture, and the figures that both are made of."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # A narrow picture is read on a phone; `matplotlibrc` has its colors.
    mpl.rcParams.update({"svg.fonttype": "none", "font.size": 11, "svg.hashsalt": ""})
    figure, axes = plt.subplots(figsize=(5.2, 0.62 * len(found) + 1))
    shown = contestants(found)[1:]
    for k, name in enumerate(shown):
        pairs = [(i, each["ms"][name] / each["ms"]["eager"]) for i, each in enumerate(found) if name in each["ms"]]
        places = [i + 0.8 * (k + 0.5) / len(shown) - 0.4 for i, _ in pairs]
        label = name.replace("ours", "primitives.compile")
        axes.barh(places, [y for _, y in pairs], 0.75 / len(shown), label=label, color=f"C{k}")
    axes.axvline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(found)), [each["case"].replace(", ", "\n", 1) for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("time / time of eager torch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.35, 1), frameon=False)
    figure.tight_layout()
    name, text = ("compile", _PAGE) if device == "cpu" else ("compile_gpu", _GPU_PAGE)
    values = {"table": tables(found), "gpu": device == "cuda" and torch.cuda.get_device_name()}
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    (folder / f"{name}.json").write_text(json.dumps(list(found), indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text.format(**values, name=name), encoding="utf-8")


_PAGE = """# Compiled training steps

`python -m perf compile --write` makes this page: loss and gradients of all weights, float32, one CPU thread, the
least time of each in turns. A dash: the compiler raises, breaks the graph, or nobody wrote the step for it.
*Difference* is the largest relative one from eager. *First call* is one in a fresh process without Inductor's files
(`primitives.compile`, "ours" / torch.compile / jax.jit), *again* one in a process that finds them. *Saved* is kept
for the backward pass besides weights and data (eager / ours / the step without the JVP, where its target is
constant); *peak* is a step's memory besides its arguments (eager / ours / torch.compile).

{table}

![Times of the steps beside those of eager torch]({name}.svg)
"""
_GPU_PAGE = """# Compiled training steps on a GPU

`python -m perf compile --device cuda --write` makes this page: the steps of [the page for a CPU](compile.md) on one
{gpu}, loss and gradients of all weights, float32 without TF32, the least time of each in turns, each waited for.
*Graphs* is `mode="reduce-overhead"`, which repeats launches as CUDA graphs.

{table}

![Times of the steps beside those of eager torch]({name}.svg)
"""


if __name__ == "__main__":
    print(first_call(*sys.argv[1:]))
