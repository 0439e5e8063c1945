"""Runs a check in several processes at once, which talk to each other by gloo."""

import datetime
import functools
import multiprocessing
import pathlib
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

# Far above what a check takes, and what a process waits for another that is gone.
TIME_OUT = 60.0


@functools.cache
def _context():
    # Imports are made once, by a server that has no threads, and processes are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    return context


def _main(rank, world, store, outcome, check, args, wait):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=wait))
    # A process that fails at once would fail the others while they connect.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(world)])
    try:
        check(rank, world, *args)
        outcome.send(None)
    except BaseException as error:  # whatever a check raises is its outcome
        outcome.send((type(error).__name__, str(error), traceback.format_exc()))
        raise SystemExit(1) from None
    dist.destroy_process_group()


def outcomes(check, *args, world=2, wait=TIME_OUT, time_out=TIME_OUT):
    """Outcomes of `check(rank, world, *args)` in each process: None, or name, text and traceback of an error."""
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(world):
            here, there = _context().Pipe(duplex=False)
            given = (rank, world, str(pathlib.Path(folder, "store")), there, check, args, wait)
            processes.append(_context().Process(target=_main, args=given, daemon=True))
            processes[-1].start()
            there.close()
            ends.append(here)
        deadline, found = time.monotonic() + time_out, []
        for end, process in zip(ends, processes, strict=True):
            try:
                ended = end.poll(max(0.0, deadline - time.monotonic()))
                found.append(end.recv() if ended else ("TimeOut", "it did not end", ""))
            except EOFError:
                process.join(1)
                found.append(("Died", f"it ended without a word, exit code {process.exitcode}", ""))
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
    return found


def check_in_processes(check, *args, world=2, time_out=TIME_OUT):
    """Raise what `check(rank, world, *args)` raises in any process."""
    found = outcomes(check, *args, world=world, time_out=time_out)
    # A process that fails closes its connections, which the others report.
    failed = [(rank, *what) for rank, what in enumerate(found) if what is not None]
    failed.sort(key=lambda one: "closed by peer" in one[2])
    assert not failed, f"rank {failed[0][0]}: {failed[0][3] or failed[0][1:3]}"
