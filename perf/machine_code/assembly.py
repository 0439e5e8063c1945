"""The resources of a compiled kernel: registers, spills, widths of its accesses, loads under way in its loops."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import triton


class Access(NamedTuple):
    """A load or store (atomic operations are stores) of adjacent bytes of global memory by one thread.

    `pointer` is the number of the kernel's pointer argument that it goes through; None where that cannot be told.
    """

    kind: str
    num_bytes: int
    pointer: int | None


def is_amd(chip_name: str) -> bool:
    """Whether the chip is one of AMD's."""
    return chip_name.startswith("gfx")


def usage(chip_name: str, compiled: Any) -> tuple[int, int, int]:
    """Registers of a thread, spills (bytes of stack on NVIDIA, registers on AMD) and bytes of local memory."""
    if is_amd(chip_name):
        names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        found = [int(re.findall(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[0]) for name in names]
        return found[0], found[1] + found[2], found[3]
    cuobjdump = pathlib.Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run([cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    fields = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
    return fields["REG"], fields["STACK"], fields["LOCAL"]


_GLOBAL = r"ptr addrspace\(1\)"
_NAME = r"%[\w.]+"
_DEFINE = re.compile(r"^define [^@]*@[\w.$]+\((.*?)\)[^()]*\{", re.MULTILINE)
# Instructions through which an address reaches an access, and NVIDIA's and AMD's spellings of the accesses.
_DERIVE = re.compile(
    rf"^\s*({_NAME}) = .*?(?:getelementptr|phi ptr|select |addrspacecast|make\.buffer\.rsrc|ptrtoint|inttoptr)"
)
_ASSEMBLY = re.compile(r"asm sideeffect \"([^\"]*)\"")
# Qualifiers (volatile, relaxed, scopes, caching) stand on either side of the state space.
_NVIDIA = re.compile(r"\b(ld|st|atom|red)(?:\.\w+)*?\.global[\w.:]*?(?:\.v(\d+))?\.[bfsu](\d+)\b")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*\], (0x[0-9a-f]+|\d+)")
_BUFFER = re.compile(r"@llvm\.amdgcn\.raw\.ptr\.buffer\.(load|store|atomic)[\w.]*?\.(v\d+)?([a-z]+)(\d+)\(")
_PLAIN = re.compile(rf"(?:= load|^\s*store|= atomicrmw \w+)(?: volatile)? ?(.*?),? {_GLOBAL} ({_NAME}), align (\d+)")
_COPY_TO_LDS = re.compile(r"@llvm\.amdgcn\.[\w.]*load[\w.]*lds[\w.]*\(.*?i32 (\d+), i32")
_TYPE = re.compile(r"^(?:<(\d+) x )?([a-z]+)(\d*)")
_TYPE_BITS = {"float": 32, "double": 64, "half": 16, "bfloat": 16}


def _function(llvm_ir: str) -> tuple[list[str], str]:
    """Names of the pointer arguments, and the text behind the arguments."""
    parameters = _DEFINE.search(llvm_ir)
    if parameters is None:
        raise ValueError("accesses: the text must define a function, got none.")
    return re.findall(rf"{_GLOBAL}[^,]*?({_NAME})(?:,|$)", parameters.group(1)), llvm_ir[parameters.end() :]


def unseen_pointers(llvm_ir: str) -> set[int]:
    """Pointer arguments that the code makes use of, and through which `accesses` finds no load and no store."""
    pointers, body = _function(llvm_ir)
    used = set(re.findall(_NAME, body))
    seen = {access.pointer for access in accesses(llvm_ir)}
    return {number for number, name in enumerate(pointers) if name in used} - seen


def accesses(llvm_ir: str) -> list[Access]:
    """All loads and stores of global memory, traced to the pointer arguments.

    The text is LLVM's, where each value has one name and addresses are derived by few instructions; the assembler
    changes no widths any more.

    Raises:
        ValueError: If the text defines no function, or has a part in assembly of which it is not known what it does to
            global memory.
    """
    pointers, body = _function(llvm_ir)
    origins = {name: {number} for number, name in enumerate(pointers)}
    lines = body.splitlines()
    derived = [
        (match.group(1), set(re.findall(_NAME, line[match.end() :])))
        for line in lines
        if (match := _DERIVE.match(line))
    ]
    changed = True
    while changed:
        changed = False
        for name, sources in derived:
            found = set().union(*(origins.get(source, set()) for source in sources))
            if not found <= origins.get(name, set()):
                origins.setdefault(name, set()).update(found)
                changed = True
    return [access for line in lines for access in _accesses_of(line, origins)]


def _accesses_of(line: str, origins: dict[str, set[int]]) -> list[Access]:
    def pointer(space: int) -> int | None:
        names = re.findall(rf"ptr addrspace\({space}\)[^,%]*({_NAME})", line)
        found = set().union(*(origins.get(name, set()) for name in names)) if names else set()
        return next(iter(found)) if len(found) == 1 else None

    assembly = _ASSEMBLY.search(line)
    if assembly is not None:
        # LLVM writes line feeds and tabs by their numbers, whose last digit would join the instruction behind it.
        text = assembly.group(1).replace(r"\0A", " ").replace(r"\09", " ")
        found = [
            ("load" if op == "ld" else "store", int(n or 1) * int(bits) // 8) for op, n, bits in _NVIDIA.findall(text)
        ]
        found += [("load", int(size, 0)) for size in _COPY.findall(text)]
        if ".global" in text and not found:
            raise ValueError(f"accesses: loads, stores and copies are known of global memory, got {text!r}.")
        return [Access(kind, size, pointer(1)) for kind, size in found]
    match = _BUFFER.search(line)
    if match is not None and not line.startswith("declare"):
        kind, vector, _, bits = match.groups()
        size = int((vector or "v1")[1:]) * int(bits) // 8
        return [Access("load" if kind == "load" else "store", size, pointer(8))]
    match = _COPY_TO_LDS.search(line)
    if match is not None and not line.startswith("declare"):
        return [Access("load", int(match.group(1)), pointer(8) if "addrspace(8)" in line else pointer(1))]
    match = _PLAIN.search(line)
    if match is None:
        return []
    kind = "load" if "= load" in line else "store"
    # A vector that is aligned to less than its size is taken apart.
    return [Access(kind, min(_type_bytes(match.group(1)), int(match.group(3))), pointer(1))]


def _type_bytes(text: str) -> int:
    match = _TYPE.match(text)
    if match is None:
        raise ValueError(f"accesses: a type of LLVM is needed, got {text!r}.")
    count, base, bits = match.groups()
    return int(count or 1) * (_TYPE_BITS.get(base) or int(bits)) // 8


# A loop without another one inside; its end is indented as it is.
_LOOP = re.compile(r"^( *)(?:\S.*)?scf\.for (?:(?!scf\.for )[^\0])*?^\1\}", re.MULTILINE)
_LOADED = re.compile(r"(%[\w.-]+) = (?:tt\.load|amdg\.buffer_load|ttg\.async_copy_global_to_local) ")


def loads_ahead(chip_name: str, ttgir: str) -> str:
    """For each innermost loop that loads, how much is under way when a step waits for its own, or `-` where nothing is.

    On NVIDIA these are groups of copies to shared memory; on AMD loads whose values the next step takes.
    """
    found = []
    for body in (match.group() for match in _LOOP.finditer(ttgir)):
        loaded = set(_LOADED.findall(body))
        ahead = [int(number) for number in re.findall(r"ttg\.async_wait .*\{num = (\d+)", body)]
        if is_amd(chip_name):
            taken = loaded.intersection(re.findall(r"%[\w.-]+", " ".join(re.findall(r"scf\.yield (.*)", body))))
            ahead = [len(taken)] if taken else []
        found += [str(min(ahead)) if ahead else "-"] * bool(loaded)
    return " ".join(found)
