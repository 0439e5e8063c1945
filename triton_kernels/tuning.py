"""Tuning: choose launch plans by timing them on the device at hand. Off unless it is asked for.

With `PRIMITIVES_AUTOTUNE=1`, or after `enable()`, the first call of a launcher for new sizes times the plans near the
default one and keeps the fastest; see docs/how-to/tune.md. `python -m primitives.kernels.tuning` prints what was
chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from .runtime.chips import chip_of, device_name
from .runtime.kernel import INTERPRETED, is_tracing
from .runtime.launch_cache import repeatable
from .runtime.planned import PlanKey, Request, forget_plans, set_advisor

# A file of another layout is not read.
FORMAT = 1


def cache_path() -> Path:
    """The file: in `PRIMITIVES_CACHE_DIR` if that is set, else in the user's cache folder."""
    folder = os.environ.get("PRIMITIVES_CACHE_DIR")
    if folder:
        return Path(folder) / "launch_plans.json"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch-training-primitives" / "launch_plans.json"


class Store:
    """Choices by environment (chip, device, software) and request."""

    def __init__(self, path: Path) -> None:
        """Read what is at `path`, if anything."""
        self._path = path
        self._lock = threading.Lock()
        self._entries = _read(path)

    def find(self, environment: str, request: Request) -> Any | None:
        """The plan chosen for a request, if there is one and it was chosen over the same default."""
        entry = self._entries.get(environment, {}).get(str(request.key))
        if entry is None or entry["default"] != asdict(request.default):
            return None
        plans = (request.default, *request.candidates())
        return next((plan for plan in plans if asdict(plan) == entry["chosen"]), None)

    def keep(self, environment: str, request: Request, chosen: Any, default_time: float, chosen_time: float) -> None:
        """Answer a request with this plan from here on; times are milliseconds of the launcher."""
        plans = {"default": asdict(request.default), "chosen": asdict(chosen)}
        with self._lock:
            of_environment = self._entries.setdefault(environment, {})
            of_environment[str(request.key)] = {**plans, "default_ms": default_time, "chosen_ms": chosen_time}
        forget_plans()

    def save(self) -> None:
        """Add the choices to the file. Where another process was first, its choice stays, and is taken over."""
        with self._lock:
            for environment, entries in _read(self._path).items():
                mine = self._entries.setdefault(environment, {})
                mine.update({key: e for key, e in entries.items() if mine.get(key, e)["default"] == e["default"]})
            try:
                _write(self._path, {"format": FORMAT, "choices": self._entries})
            except OSError as error:
                warnings.warn(f"Tuned launch plans are not kept: {error}", stacklevel=2)
        forget_plans()

    def table(self) -> Iterator[str]:
        """Lines that show the choices beside the default plans."""
        if not any(self._entries.values()):
            yield f"No tuned launch plans in {self._path}"
            return
        yield f"Tuned launch plans in {self._path}"
        for environment, entries in sorted(self._entries.items()):
            yield f"\n{environment}"
            for key, entry in sorted(entries.items()):
                gain = entry["default_ms"] / entry["chosen_ms"] if entry["chosen_ms"] else 1.0
                yield f"  {key}"
                yield f"    {entry['default_ms']:.4f} ms -> {entry['chosen_ms']:.4f} ms, {gain:.2f} x"
                chosen, default = entry["chosen"], entry["default"].items()
                changes = ", ".join(
                    f"{name} {value} -> {chosen[name]}" for name, value in default if chosen[name] != value
                )
                yield f"    {changes or 'the default plan'}"


def _read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Choices in a file; none, with a warning, if it is not one that `_write` has written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return {}
        for entries in content["choices"].values():
            for entry in entries.values():
                dict(entry["default"], **entry["chosen"])
                float(entry["default_ms"] + entry["chosen_ms"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"The tuned launch plans in {path} cannot be read and are ignored: {error!r}", stacklevel=2)
        return {}
    return content["choices"]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        # Another process sees the file as it was or as it is, never a part of it.
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


Launcher = TypeVar("Launcher", bound=Callable[..., Any])
Timer = Callable[[Callable[[], Any]], float]

__all__ = ["cache_path", "disable", "enable", "is_enabled", "tunable"]

# A plan replaces the default one only if it is faster by more than two runs of the same kernel differ.
MIN_GAIN = 0.03

# How far results of another plan may be from those of the default one, relative to the largest element of a tensor: two
# roundings of the narrow dtypes, and of the wider ones what adding thousands of values up in another order does.
TOLERANCES = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 2**-16, torch.float64: 2**-45}

# Words of errors that leave a device usable: a plan took more than there is. Any other is the end of its
# context, and every later call of the process would fail too.
REFUSALS = (
    "too many resources",
    "out of resource",
    "out of memory",
    "invalid argument",
    "invalid configuration",
    "invalid value",
)

# A new number of splits leads to other sizes of the kernel that merges them, which are then tuned in turn.
MAX_ROUNDS = 16


def _time_on_device(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))  # pyright: ignore[reportArgumentType] - one figure, not a list


class Tuner:
    """Answers requests for plans from what was chosen before, and notes those that nothing is known of."""

    def __init__(self, path: Path, timer: Timer, on_any_device: bool) -> None:
        """Read the choices at `path`."""
        self._store = Store(path)
        self._timer = timer
        self._on_any_device = on_any_device
        # One launch is timed at a time; what else runs on the device would spoil the figures.
        self._lock = threading.RLock()
        self._thread = threading.local()

    def advise(self, request: Request) -> tuple[Any, bool]:
        """The plan under trial, the one chosen before, or for the time being the default."""
        trial = getattr(self._thread, "trial", None)
        if trial is not None and trial[0] == request.key:
            return trial[1], False
        chosen = self._store.find(_environment(request.device), request)
        if chosen is not None:
            return chosen, True
        asked = getattr(self._thread, "asked", None)
        if asked is not None:
            asked[request.key] = request
        return request.default, False

    def call(self, launcher: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Results of the launcher; its plans are chosen on the way if they are new."""
        device = next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
        if getattr(self._thread, "asked", None) is not None or device is None or not self._allowed(device):
            return launcher(*args, **kwargs)
        results, asked = self._watch(lambda: launcher(*args, **kwargs))
        if asked:
            with self._lock, torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                self._tune(lambda: launcher(*args, **kwargs), results)
        return results

    def _allowed(self, device: torch.device) -> bool:
        if is_tracing() or torch.compiler.is_compiling():
            return False
        if device.type != "cuda" or INTERPRETED:
            return self._on_any_device
        # Timing waits for the device, which nothing may do while a graph is captured.
        return not torch.cuda.is_current_stream_capturing()

    def _watch(self, run: Callable[[], Any], trial: tuple[PlanKey, Any] | None = None) -> tuple[Any, dict]:
        """Results, and the requests that nothing is known of; with `trial`, one of them is answered by it."""
        self._thread.asked = asked = {}
        self._thread.trial = trial
        try:
            return run(), asked
        finally:
            self._thread.asked = self._thread.trial = None

    def _tune(self, run: Callable[[], Any], expected: Any) -> None:
        for _ in range(MAX_ROUNDS):
            _, asked = self._watch(run)
            if not asked:
                break
            self._choose(next(iter(asked.values())), run, expected)
        self._store.save()

    def _choose(self, request: Request, run: Callable[[], Any], expected: Any) -> None:
        environment, fastest = _environment(request.device), request.default
        default_time = best_time = self._time(run, (request.key, request.default))
        for plan in request.candidates():
            trial = (request.key, plan)
            try:
                results, _ = self._watch(run, trial)
                if not agree(results, expected):
                    continue
                time = self._time(run, trial)
            # A plan that takes more than the chip has is refused when it is compiled or launched, by many types.
            except Exception as error:
                if is_device_fault(error):
                    raise
                continue
            if time < min(best_time, default_time * (1 - MIN_GAIN)):
                fastest, best_time = plan, time
        self._store.keep(environment, request, fastest, default_time, best_time)

    def _time(self, run: Callable[[], Any], trial: tuple[PlanKey, Any]) -> float:
        return self._watch(lambda: self._timer(run), trial)[0]


def _environment(device: Any) -> str:
    return f"{chip_of(device).name}, {device_name(device)}, {_software()}"


@functools.cache
def _software() -> str:
    import triton

    try:
        release = importlib.metadata.version("torch-training-primitives")
    except importlib.metadata.PackageNotFoundError:
        release = "not installed"
    return f"Triton {triton.__version__}, torch-training-primitives {release}, sources {source_hash()}"


def source_hash(folder: Path = Path(__file__).parent) -> str:
    """Hash of all sources of this package, any of which may make other plans the fastest: kernels, launchers, plans."""
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def is_device_fault(error: Exception) -> bool:
    """Whether an error says that the device has failed, an illegal access for one, and not that a plan was refused."""
    text = str(error)
    of_device = isinstance(error, getattr(torch, "AcceleratorError", ())) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]"))
    )
    return of_device and not any(refusal in text for refusal in REFUSALS)


def agree(results: Any, expected: Any) -> bool:
    """Whether tensors, or tuples of them, are the same up to rounding (see `TOLERANCES`); integers have none."""
    if not isinstance(expected, torch.Tensor):
        return len(results) == len(expected) and all(map(agree, results, expected))
    if not expected.is_floating_point():
        return torch.equal(results, expected)
    if expected.numel() == 0:
        return True
    finite = expected[expected.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    atol = TOLERANCES[expected.dtype] * scale
    return torch.allclose(results, expected, rtol=0.0, atol=atol, equal_nan=True)


_tuner: Tuner | None = None


def enable(path: Path | None = None, timer: Timer | None = None, *, on_any_device: bool = False) -> None:
    """Tune from here on.

    Args:
        path: Where choices are kept; None for `cache_path()`.
        timer: Takes a function without arguments and returns its time in milliseconds; None for the median of
            `triton.testing.do_bench`.
        on_any_device: Tune in Triton's interpreter and for the CPU too, where times say nothing; for tests.
    """
    global _tuner
    _tuner = Tuner(path or cache_path(), timer or _time_on_device, on_any_device)
    set_advisor(_tuner.advise)


def disable() -> None:
    """Take the default plans from here on."""
    global _tuner
    _tuner = None
    set_advisor(None)


def is_enabled() -> bool:
    """Whether plans are tuned, or taken from what was tuned before."""
    return _tuner is not None


def tunable(launcher: Launcher) -> Launcher:
    """Decorate a launcher so that its plans are tuned where that is enabled; it must not write to its arguments."""

    @functools.wraps(launcher)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return launcher(*args, **kwargs) if _tuner is None else _tuner.call(launcher, args, kwargs)

    return repeatable(wrapper)  # pyright: ignore[reportReturnType] - same signature


def _requested() -> bool:
    value = os.environ.get("PRIMITIVES_AUTOTUNE", "0")
    if value not in ("0", "1"):
        warnings.warn(f"PRIMITIVES_AUTOTUNE must be 0 or 1, got {value!r}; plans are not tuned.", stacklevel=2)
    return value == "1"


def main(arguments: list[str] | None = None) -> int:
    """Print the chosen plans beside the default ones, or forget them."""
    parser = argparse.ArgumentParser(
        prog="python -m primitives.kernels.tuning", description="Print the launch plans that tuning has chosen."
    )
    parser.add_argument("--clear", action="store_true", help="forget all choices")
    options = parser.parse_args(arguments)
    path = cache_path()
    if options.clear:
        path.unlink(missing_ok=True)
    sys.stdout.write("\n".join(Store(path).table()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
elif _requested():
    enable()
