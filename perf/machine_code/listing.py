"""Figures of each loop of a kernel that its time depends on: reductions, bytes loaded, copies under way.

Loads and copies are those of NVIDIA's machine code, listed by a disassembler that comes with Triton; how often a loop
runs, what it reduces, and on AMD what it loads ahead, are read from Triton's own text.
"""

from __future__ import annotations

import functools
import pathlib
import re
import struct
import subprocess
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Region(NamedTuple):
    """The body of a loop without the loops in it, or all that is in none.

    Attributes:
        trips: How often a program runs it, as `begin:end:step` in arguments of the kernel, its number and theirs.
        reductions: Reductions across the warps of a block, each of which waits for the one before.
        loaded: Bytes that a thread loads from global memory, or copies to shared memory; None on AMD.
        ahead: Copies that may be under way when a step waits for its own; None where nothing is copied ahead. On AMD
            loads of the next step that go before the work of this one.
        unguarded: Whether it copies to memory that other warps may still be reading.
    """

    trips: str = "0:1:1"
    reductions: int = 0
    loaded: int | None = None
    ahead: int | None = None
    unguarded: int | None = None

    def __str__(self) -> str:
        """As in the table: `0:num_rows:1 r2 l48 a1 u0`, each number behind a name's first letter."""
        numbers = zip(self._fields[1:], self[1:], strict=True)
        return " ".join([self.trips, *(f"{name[0]}{number}" for name, number in numbers if number is not None)])

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Region:
        """The region of such a text."""
        trips, *words = text.split()
        names = {name[0]: name for name in cls._fields[1:]}
        return cls(trips, **{names[word[0]]: int(word[1:]) for word in words})


_ASSIGNMENT = re.compile(r"^\s*(%[\w.-]+) = (\S+) (.*?)(?: loc\(.*)?$", re.MULTILINE)
_FOR = re.compile(r"scf\.for \S+ = (%[\w.-]+) to (%[\w.-]+) step (%[\w.-]+)")
_OPERATORS = {"addi": "+", "subi": "-", "muli": "*", "divsi": "//", "remsi": "%"}
_COMPARISONS = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
_SAME_VALUE = {"extsi", "extui", "trunci", "index_cast"}


class _Bounds:
    """Bounds of the loops of a kernel in Triton's text, as expressions in its arguments and the program's number."""

    def __init__(self, ttir: str) -> None:
        self._made = {
            name: (operation.partition(".")[2], rest, re.findall(r"%[\w.-]+", rest))
            for name, operation, rest in _ASSIGNMENT.findall(ttir)
        }
        self._uses: Counter[str] = Counter()
        self._named: dict[str, str] = {}

    def trips(self, values: Sequence[str]) -> str:
        """As `Region.trips`; what occurs more than once gets a name where it occurs first."""
        self._uses.clear()
        self._named.clear()
        for value in values:
            self._count(value)
        return ":".join(map(self._text, values))

    def _origin(self, value: str) -> str:
        while value in self._made and self._made[value][0] in _SAME_VALUE:
            value = self._made[value][2][0]
        return value

    def _count(self, value: str) -> None:
        value = self._origin(value)
        self._uses[value] += 1
        if self._uses[value] == 1 and value in self._made:
            for operand in self._made[value][2]:
                self._count(operand)

    def _text(self, value: str) -> str:
        value = self._origin(value)
        if value not in self._named:
            text = self._expression(value)
            if self._uses[value] == 1 or text.isidentifier() or text.isdigit():
                return text
            self._named[value] = f"t{len(self._named)}"
            return f"({self._named[value]}:={text})"
        return self._named[value]

    def _expression(self, value: str) -> str:
        if value not in self._made:
            return value.removeprefix("%")
        name, rest, operands = self._made[value]
        if name == "constant":
            return rest.split()[0]
        if name in {"get_program_id", "get_num_programs"}:
            return f"program{'s' * (name != 'get_program_id')}_{rest[0]}"
        if name in _OPERATORS or name == "cmpi":
            operator = _OPERATORS.get(name) or _COMPARISONS[rest.split(",")[0]]
            return _folded(self._text(operands[0]), operator, self._text(operands[1]))
        if name in {"minsi", "maxsi"}:
            return f"{name[:3]}({self._text(operands[0])},{self._text(operands[1])})"
        if name == "select":
            yes, no, condition = (self._text(operands[number]) for number in (1, 2, 0))
            return f"({yes},{no})[not({condition})]"
        raise ValueError(f"trips: bounds of loops are arithmetic on arguments, got {value} = {name} {rest}.")


def _folded(left: str, operator: str, right: str) -> str:
    text = f"{left}{operator}{right}"
    if left.isdigit() and right.isdigit():
        return str(eval(text))
    if left == "0" and operator in {"*", "//", "%"}:
        return "0"
    if (right, operator) in {("0", "+"), ("0", "-"), ("1", "*"), ("1", "//")}:
        return left
    return right if (left, operator) in {("0", "+"), ("1", "*")} else f"({text})"


class _Source(NamedTuple):
    """A region of Triton's text; `ahead` counts loads whose values the next step takes, as AMD's compiler arranges."""

    trips: str
    reductions: int
    stores: bool
    ahead: int


_LAYOUT = re.compile(r"^(#\w+) = #ttg\.\w+<\{(.*)\}>", re.MULTILINE)
_LOADED = re.compile(r"(%[\w.-]+) = (?:tt\.load|amdg\.buffer_load) ")
_REDUCED = re.compile(r"^\}\) : \(tensor<[\w<>x]*?, (.*?)>[,)]")


def _source_regions(ttir: str, ttgir: str) -> list[_Source]:
    """The code outside of loops, then each loop in the order of the text."""
    layouts = dict(_LAYOUT.findall(ttgir))
    bounds = _Bounds(ttir)
    trips = [Region().trips, *(bounds.trips(found) for found in _FOR.findall(ttir))]
    reductions, stores, ahead = [0] * len(trips), [False] * len(trips), [0] * len(trips)
    loaded: set[str] = set()
    # Indents and numbers of the loops that are open.
    inside, started, axis = [(-1, 0)], 0, 0
    for line in ttgir.splitlines():
        text = line.lstrip()
        indent, number = len(line) - len(text), inside[-1][1]
        if "scf.for " in text:
            started += 1
            inside.append((indent, started))
        elif text.startswith("}") and indent == inside[-1][0]:
            inside.pop()
        elif '"tt.reduce"' in text:
            axis = int(re.findall(r"axis = (\d+)", text)[0])
        elif (reduced := _REDUCED.match(text)) is not None:
            reductions[number] += _warps_share(axis, reduced.group(1), layouts)
        elif text.startswith("scf.yield "):
            ahead[number] += len(loaded.intersection(re.findall(r"%[\w.-]+", text)))
        loaded.update(_LOADED.findall(text))
        stores[number] |= text.startswith(("tt.store", "amdg.buffer_store"))
    return [_Source(*each) for each in zip(trips, reductions, stores, ahead, strict=True)]


def _warps_share(axis: int, layout: str, layouts: Mapping[str, str]) -> bool:
    """Whether an axis of a tensor lies in several warps."""
    sliced = re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*?)\}>?$", layout)
    if sliced is not None:
        return _warps_share(axis + (axis >= int(sliced.group(1))), sliced.group(2), layouts)
    counts = re.search(r"warpsPerCTA = \[([\d, ]*)\]", layouts[layout])
    if counts is not None:
        return int(counts.group(1).split(", ")[axis]) > 1
    steps = re.findall(r"warp = \[(.*?)\](?:, block|$)", layouts[layout])[0]
    return any(int(step.split(", ")[axis]) for step in re.findall(r"\[([\d, ]+)\]", steps))


_READS = {"LDS", "LDSM"}
_EXCHANGES = {"STS", "STSM"}
_PRODUCTS = {"HMMA", "HGMMA", "UTCHMMA"}
_GLOBAL = {"LDG", "LDGSTS", "STG"}
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


class Instruction(NamedTuple):
    """One instruction."""

    address: int
    opcode: str
    operands: str


def _decode(sass: str) -> list[Instruction]:
    """The instructions of a disassembler's text."""
    return _without_padding([Instruction(int(address, 16), *rest) for address, *rest in _LINE.findall(sass)])


def _without_padding(code: list[Instruction]) -> list[Instruction]:
    """The code of a kernel up to where it ends."""
    is_code = [one.opcode != "NOP" and _target(one) != one.address for one in code]
    return code[: len(code) - is_code[::-1].index(True)]


def _target(instruction: Instruction) -> int | None:
    match = re.search(r"0x([0-9a-f]+)", instruction.operands)
    return int(match.group(1), 16) if match and instruction.opcode.startswith("BRA") else None


def _jumps_back(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """First and last address of every loop, outer ones first."""
    end = max((one.address for one in code if one.opcode.startswith("EXIT")), default=code[-1].address)
    found: dict[int, int] = {}
    for one in code:
        target = _target(one)
        # Code behind the end jumps back to where it came from.
        if target is not None and target < one.address < end:
            found[target] = one.address
    return sorted(found.items(), key=lambda span: (span[0], -span[1]))


def _is_in(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a loop lies in another one."""
    return other[0] <= span[0] and span[1] <= other[1] and span != other


def listings(chip_name: str, cubins: Sequence[bytes]) -> list[list[Instruction]]:
    """Instructions of compiled kernels of NVIDIA: of all at once, for the disassembler takes half a second to start."""
    codes = [_code(cubin) for cubin in cubins]
    name = chip_name.replace("sm_", "SM") + "a" * (chip_name != "sm_80")
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        tool = pathlib.Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
        command = [tool, "--binary", name, file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    instructions = iter(_decode(text))
    found, end, one = [], 0, next(instructions, None)
    for code in codes:
        end += len(code)
        found.append([])
        while one is not None and one.address < end:
            found[-1].append(one)
            one = next(instructions, None)
    return [_without_padding(code) for code in found]


def _code(cubin: bytes) -> bytes:
    """The section of an ELF file that holds the code of its kernel."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    (found,) = (each for each in sections if cubin.startswith(b".text.", sections[names][4] + each[0]))
    return cubin[found[4] : found[4] + found[5]]


def regions(compiled: Any, code: list[Instruction] | None) -> list[Region]:
    """The code of a compiled kernel outside of loops, then its loops.

    Args:
        compiled: The kernel.
        code: Its listing; None for one of AMD.

    Raises:
        ValueError: If the loops of the code are not those of the source.
    """
    sources = _source_regions(compiled.asm["ttir"], compiled.asm["ttgir"])
    if code is None:
        return [Region(source.trips, source.reductions, ahead=source.ahead or None) for source in sources]
    spans = _loops(code)
    bodies = [_own(code, span, spans) for span in (None, *spans)]
    kept = _kept(sources[1:], [any(_name(one) == "STG" for one in body) for body in bodies[1:]])
    found = []
    for number, (source, body) in enumerate(zip([sources[0], *kept], bodies, strict=True)):
        loaded = sum(_width(one.opcode) for one in body if _name(one) in {"LDG", "LDGSTS"})
        region = Region(source.trips, source.reductions, loaded)
        # The code around a loop copies for its first steps, and waits for all of them behind it.
        is_innermost = number and not any(_is_in(span, spans[number - 1]) for span in spans)
        found.append(region._replace(**_copying(body, compiled.metadata.num_warps)) if is_innermost else region)
    return found


def _kept(loops: Sequence[_Source], stores: Sequence[bool]) -> list[_Source]:
    """The loops of the source that are loops in the code, where those of few steps may be unrolled."""
    kept = list(loops)
    for loop in loops:
        is_fixed = re.fullmatch(r"[\d:]+", loop.trips) is not None
        if is_fixed and len(kept) > len(stores) and [each.stores for each in kept] != list(stores):
            kept.remove(loop)
    if len(kept) != len(stores):
        raise ValueError(f"regions: {len(loops)} loops of the source must be in the code, got {len(stores)}.")
    return kept


def _loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """First and last address of each loop of the source: without global memory it only waits for something."""
    used = [one.address for one in code if _name(one) in _GLOBAL]
    return [span for span in _jumps_back(code) if any(span[0] <= address <= span[1] for address in used)]


def _own(
    code: Sequence[Instruction], span: tuple[int, int] | None, spans: Sequence[tuple[int, int]]
) -> list[Instruction]:
    """Instructions of a loop, or of none, that are in no loop inside of it."""
    whole = span or (code[0].address, code[-1].address)
    inner = [other for other in spans if other != span and _is_in(other, whole)] if span else spans
    return [
        one
        for one in code
        if whole[0] <= one.address <= whole[1]
        and _name(one) != "NOP"
        and not any(first <= one.address <= last for first, last in inner)
    ]


def _copying(body: Sequence[Instruction], num_warps: int) -> dict[str, int]:
    """How far ahead the body of a loop copies, and whether all warps have read what it copies over."""
    names = [_name(one) for one in body]
    waits = [int(one.operands.split(",")[1], 16) for one in body if one.opcode == "DEPBAR.LE" and "SB0" in one.operands]
    if "LDGSTS" not in names or not waits:
        return {}
    # Reads of what was copied come first: those behind a store are of what a reduction exchanges. Products read many
    # buffers by turns, and copy into the first behind a barrier.
    exchange = next((number for number, name in enumerate(names) if name in _EXCHANGES), len(names))
    reads = [n for n, one in enumerate(body[:exchange]) if names[n] in _READS and not one.operands.startswith("RZ")]
    reads = [number for number, name in enumerate(names) if name in _PRODUCTS][:1] or reads[-1:]
    guarded = num_warps == 1 or any("BAR" in names[read : names.index("LDGSTS")] for read in reads)
    return {"ahead": min(waits), "unguarded": int(not guarded)}


def _name(one: Instruction) -> str:
    return one.opcode.partition(".")[0]


def _width(opcode: str) -> int:
    return next((_WIDTHS[word] for word in reversed(opcode.split(".")) if word in _WIDTHS), 4)
