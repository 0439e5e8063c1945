"""PTX as Triton emits it, as a list of instructions."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_STATEMENT = re.compile(r"\s*(?:[{}]|(\$?[\w$]+:)|([^;{}]*(?:\{[^;]*\})?[^;]*;))", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s][^,{}\[\]]*")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_PARAMETER = re.compile(r"\.param\s+\.[usfb]\d+\b[^,]*?([\w$]+)\s*(?:,|$)")


class UnsupportedInstructionError(NotImplementedError):
    """PTX that is not emulated: an instruction, a form of one, or a register."""


class Address(NamedTuple):
    """A place in memory: a register, a parameter or a symbol, and a number of bytes behind it."""

    base: str
    offset: int


class Instruction(NamedTuple):
    """One instruction; operands are names and numbers as they are written, tuples of them, and addresses."""

    line: int
    guard: str | None
    is_negated: bool
    op: str
    qualifiers: tuple[str, ...]
    operands: tuple[Any, ...]
    text: str

    def unsupported(self) -> UnsupportedInstructionError:
        """The error of an instruction that nothing executes."""
        form = ".".join((self.op, *self.qualifiers))
        return UnsupportedInstructionError(f"The emulator does not know `{form}` (line {self.line}: `{self.text}`).")


class Code(NamedTuple):
    """The code of a kernel."""

    name: str
    # Of a block.
    threads: int
    # Their names.
    parameters: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    # The number of the instruction that follows each.
    labels: dict[str, int]
    # The kind (`"b32"`, `"pred"`) of those whose names begin so; a number follows.
    registers: dict[str, str]
    # Names of shared memory, which begins there.
    symbols: frozenset[str]
    # Registers that some instruction writes. The compiler leaves others where it does not matter what they hold.
    written: frozenset[str]

    def kind_of(self, register: str) -> str | None:
        """The declared kind of a register; None for a special one."""
        return self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))


def parse(ptx: str) -> Code:
    """The one kernel of a text.

    Raises:
        UnsupportedInstructionError: What is no instruction, or a parameter that is no number.
    """
    ptx = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), ptx)
    head = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)", ptx, re.S)
    sizes = re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", ptx)
    if head is None or sizes is None:
        raise UnsupportedInstructionError("The emulator needs PTX with one `.entry` and its number of threads.")
    parameters = tuple(_PARAMETER.findall(head[2]))
    if len(parameters) != head[2].count(".param"):
        raise UnsupportedInstructionError(f"The emulator knows parameters that are numbers alone, got `{head[2]}`.")
    start = ptx.index("{", head.end()) + 1
    body, line = ptx[start : ptx.rindex("}")], ptx.count("\n", 0, start) + 1
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    end = 0
    for found in _STATEMENT.finditer(body):
        line, end = line + body.count("\n", end, found.end()), found.end()
        label, text = found[1], " ".join((found[2] or "").rstrip(";").split())
        if label:
            labels[label[:-1]] = len(instructions)
        elif (declared := _REGISTER.match(text)) is not None:
            names = (name.strip().partition("<")[0] for name in declared[2].split(","))
            # Names of inline assembly are written without the mark of a register.
            registers |= {"%" + name.lstrip("%"): declared[1] for name in names}
        elif text and not text.startswith((".loc", ".file", ".pragma")):
            instructions.append(_instruction(text, line, registers))
    symbols = frozenset(re.findall(r"\.extern\s+\.shared[^;]*?([\w$]+)\s*\[\s*\]\s*;", ptx))
    threads = math.prod(map(int, sizes[1].replace(" ", "").strip(",").split(",")))
    targets = (each.operands[0] for each in instructions if each.operands)
    names = (name for each in targets for name in (each if isinstance(each, tuple) else (each,)))
    written = frozenset(name for name in names if str(name).startswith("%"))
    return Code(head[1], threads, parameters, tuple(instructions), labels, registers, symbols, written)


def _instruction(text: str, line: int, registers: dict[str, str]) -> Instruction:
    found = _INSTRUCTION.match(text)
    if found is None or text.startswith("."):
        raise UnsupportedInstructionError(f"The emulator does not know `{text}` (line {line}).")

    def named(name: str) -> str:
        name = name.strip()
        return f"%{name}" if f"%{name}" in registers else name

    operands: list[Any] = []
    for part in _OPERAND.findall(found[4]):
        if part[0] == "{":
            operands.append(tuple(map(named, part[1:-1].split(","))))
        elif part[0] == "[":
            base, _, offset = part[1:-1].replace(" ", "").partition("+")
            operands.append(Address(named(base), int(offset or "0", 0)))
        else:
            operands.append(named(part))
    op, *qualifiers = (part for part in found[3].replace("shared::cta", "shared").split(".") if part)
    guard = named(found[2]) if found[2] else None
    return Instruction(line, guard, found[1] == "!", op, tuple(qualifiers), tuple(operands), text)
