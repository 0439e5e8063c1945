"""Reads result files, and says what of one is damaged before somebody stumbles over it.

`perf.suite.results` describes the fields. What other modules take for granted is checked here: that every field is
there, that it is of its type, and that what they divide by is positive.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from perf.suite.results import CANNOT, ERROR, OK, SCHEMA, SKIPPED, WRONG, key
from perf.workloads import MODES, OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class ResultError(ValueError):
    """A file is no result file of this schema."""


def load(path: Path) -> dict[str, Any]:
    """The result file at `path`.

    Raises:
        ResultError: If there is none, or one of another schema, or if something of it is missing or damaged.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ResultError(f"{path}: no result file ({error}).") from error
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ResultError(f"{path}: schema must be {SCHEMA}, got {found}; measure again, or use the matching checkout.")
    for fault in _faults(result):
        raise ResultError(f"{path}: damaged: {fault}.")
    return result


class _Kind:
    """What a field must be.

    Args:
        words: The same in words, for the message.
        fits: Whether a value is that.
        optional: Whether it may also be null.
    """

    def __init__(self, words: str, fits: Callable[[Any], bool], *, optional: bool = False) -> None:
        self.words = f"{words} or null" if optional else words
        self.fits = (lambda value: value is None or fits(value)) if optional else fits


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_spread(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_positive(value.get(name)) for name in ("median", "p20", "p80"))


def _is_overhead(value: Any) -> bool:
    names = ("ratio", "ratio_p20", "ratio_p80", "limit")
    modes = value.get("modes") if isinstance(value, dict) else None
    return isinstance(modes, dict) and all(
        isinstance(mode, dict) and all(_is_number(mode.get(name)) for name in names) for mode in modes.values()
    )


def _are_bandwidths(value: Any) -> bool:
    """Whether it is what `calibration` holds of each device."""
    return isinstance(value, dict) and all(
        isinstance(sizes, dict)
        and all(
            size.isdecimal() and isinstance(speeds, dict) and _is_positive(speeds.get("copy_gbps"))
            for size, speeds in sizes.items()
        )
        for sizes in value.values()
    )


def _are_clocks(value: Any) -> bool:
    """Whether it is what was asked of each GPU, once at least."""
    names = ("driver_version", "clocks.sm", "clocks.mem")
    return isinstance(value, dict) and all(
        isinstance(asked, list)
        and asked
        and all(isinstance(one, dict) and all(isinstance(one.get(name), str) for name in names) for one in asked)
        for asked in value.values()
    )


def _instance(words: str, *types: type) -> Callable[..., _Kind]:
    return lambda optional=False: _Kind(words, lambda value: isinstance(value, types), optional=optional)


_TEXT, _OBJECT, _LIST, _BOOL = (
    _instance("text", str),
    _instance("an object", dict),
    _instance("a list", list),
    _instance("true or false", bool),
)
_NUMBER = _Kind("a finite number", _is_number)
_SOME_NUMBER = _Kind("a finite number", _is_number, optional=True)
_SOME_POSITIVE = _Kind("a positive number", _is_positive, optional=True)
_COUNT = _Kind("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool), optional=True)
_SPREAD = _Kind("an object with positive median, p20 and p80", _is_spread, optional=True)


def _one_of(*values: str) -> _Kind:
    return _Kind(f"one of {', '.join(map(repr, values))}", lambda value: isinstance(value, str) and value in values)


_TOP = {
    "created": _TEXT(),
    "options": _OBJECT(),
    "seconds": _OBJECT(),
    "complete": _BOOL(),
    "package": _OBJECT(optional=True),
    "device": _OBJECT(optional=True),
    "environment": _OBJECT(optional=True),
    "clocks": _Kind("for each GPU a list of what nvidia-smi said", _are_clocks),
    "providers": _OBJECT(),
    "calibration": _Kind("for each device an object of sizes with a positive copy_gbps", _are_bandwidths),
    "overhead": _Kind("an object with modes and their ratios and limits", _is_overhead, optional=True),
    "rows": _LIST(),
}
_PARTS = {
    "seconds": {"total": _NUMBER, "compile": _NUMBER},
    "package": {"version": _TEXT(), "revision": _TEXT(optional=True), "dirty": _BOOL(optional=True)},
    "device": {"type": _one_of("cpu", "cuda"), "name": _TEXT()},
    "environment": {"packages": _OBJECT()},
}
_GPU = {"capability": _TEXT(), "processors": _COUNT, "l2_bytes": _COUNT, "gpus": _LIST()}
_ROW = {
    **dict.fromkeys(("workload", "name", "op", "dtype", "provider"), _TEXT()),
    "shape": _LIST(),
    "layout": _one_of("", "channels_last"),
    "columns": _COUNT,
    "mode": _one_of(*MODES),
    "status": _one_of(OK, WRONG, CANNOT, ERROR, SKIPPED),
    "message": _TEXT(optional=True),
    "gpu": _TEXT(optional=True),
    **dict.fromkeys(("device_us", "call_us", "vs_torch_device", "vs_torch_call"), _SPREAD),
    **dict.fromkeys(("minimum_bytes", "kernel_bytes", "copy_gbps", "tolerance"), _SOME_POSITIVE),
    **dict.fromkeys(("error", "gbps", "fraction_of_copy", "kernel_fraction", "peak_bytes"), _SOME_NUMBER),
    "launches": _COUNT,
}
# What goes with a field that is there: plots and tables take both.
_TOGETHER = {
    "gbps": ("columns", "copy_gbps"),
    "kernel_bytes": ("minimum_bytes",),
    "fraction_of_copy": ("copy_gbps",),
}


def _faults(result: dict[str, Any]) -> Iterator[str]:
    """What is damaged, in words."""
    yield from _misfits("", result, _TOP)
    for name, kinds in _PARTS.items():
        if result[name] is not None:
            yield from _misfits(f"{name}.", result[name], kinds)
    if result["device"] and result["device"]["type"] == "cuda":
        yield from _misfits("device.", result["device"], _GPU)
    seen: set[tuple[str, str, str]] = set()
    for number, row in enumerate(result["rows"]):
        where = f"rows[{number}]"
        if not isinstance(row, dict):
            yield f"{where} must be an object, got {_shown(row)}"
            return
        yield from _misfits(f"{where}.", row, _ROW)
        yield from _inconsistencies(where, row)
        if key(row) in seen:
            yield f"{where} must be the only row of {', '.join(key(row))}"
        seen.add(key(row))


def _misfits(prefix: str, record: dict[str, Any], kinds: dict[str, _Kind]) -> Iterator[str]:
    for name, kind in kinds.items():
        if name not in record:
            yield f"{prefix}{name} is missing"
        elif not kind.fits(record[name]):
            yield f"{prefix}{name} must be {kind.words}, got {_shown(record[name])}"


def _inconsistencies(where: str, row: dict[str, Any]) -> Iterator[str]:
    for name, others in _TOGETHER.items():
        for other in others:
            if row[name] is not None and row[other] is None:
                yield f"{where}.{other} must not be null beside a {name}"
    if row["status"] == OK and row["call_us"] is None:
        yield f"{where}.call_us must not be null where the status is ok"
    if row["status"] == WRONG and row["error"] is not None and row["tolerance"] is None:
        yield f"{where}.tolerance must not be null beside an error"
    if row["kernel_bytes"] is not None and row["op"] not in OPS:
        yield f"{where}.op must be one of {', '.join(OPS)} beside kernel_bytes, got {row['op']}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
