"""chunk_size and chunks bound peak memory: the benchmark, run small."""

import pytest
import torch

chunking = pytest.importorskip("perf.chunking", reason="perf is not importable: run from the root of the repository")


def test_the_peak_falls_with_the_chunk():
    rows = list(chunking.measure(512, torch.device("cpu")))
    assert {row.transform for row in rows} == {"vmap", "chunk_vmap", "vmap of grad", "jacrev", "hessian"}
    assert chunking.failures(rows) == []
    for name in {row.transform for row in rows}:
        peaks = [row.peak_bytes for row in rows if row.transform == name]
        assert peaks == sorted(peaks, reverse=True)
        # All values of all entries, at least: the meter sees the work.
        assert peaks[0] >= chunking.ENTRIES * 512 * 4


def test_a_peak_that_does_not_fall_is_reported():
    rows = [chunking.Row("vmap", None, 100, 1.0, 1.0), chunking.Row("vmap", 8, 90, 0.9, 1.0)]
    assert chunking.failures(rows) == rows[1:]
