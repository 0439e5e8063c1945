"""The table of machine code: what the compiler makes of every kernel of the bench, for each supported chip.

`python -m perf.machine_code` brings the table up to date, `--check` recompiles all of it and compares;
`docs/developers/gates.md` says what the table is for. No GPU takes part: the launchers run on CPU tensors while a
stand-in Triton driver answers for the chip, and each of their launches is compiled instead of run. This needs a process
in which `TRITON_INTERPRET` is not set: Triton reads it when it is imported.
"""
