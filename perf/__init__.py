"""Programs that measure: the demo and the benchmarks."""
