"""The perf suite: what is measured, how, and what becomes of it.

`plan` chooses units (one workload in one mode) and gives each a budget; `driver` starts pytest-xdist workers over them
(`processes`); `test_cases` is what a `worker` runs, `unit` what it does for one unit with `modes`, `providers`,
`reference`, `sampling` and `timers`, under the device's lock (`locks`) and within what is left of the run's time
(`budget`); `results`, `reader`, `compare`, `targets`, `report` and `plots` deal with the JSON file that comes out.
"""
