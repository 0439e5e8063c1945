"""The perf suite: what is measured, how, and what becomes of it.

`plan` chooses units (one workload in one mode); `run` starts a session of pytest over them, in which each is a test
(`test_suite`, `conftest`) that does what `unit` says, with `modes`, `providers`, `reference` and `timing`; `results`,
`compare`, `targets` and `report` deal with the JSON file that comes out.
"""
