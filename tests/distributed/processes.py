"""Runs a check in several processes at once, which talk to each other by gloo."""

import datetime
import multiprocessing
import pathlib
import tempfile
import time

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

# Imports are made once, by a server that has no threads, and processes are forked from it.
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.distributed.preloaded"])


def _main(rank, world, store, check, args, wait):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store, wait = dist.FileStore(store, world), datetime.timedelta(seconds=wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    # A process that fails at once would fail the others while they connect.
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(world)])
    check(rank, world, *args)
    dist.destroy_process_group()


def check_in_processes(check, *args, world=2, wait=60.0, time_out=60.0):
    """Raise what `check(rank, world, *args)` raises in any process; `wait` seconds for another that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world, str(pathlib.Path(folder, "store")), check, args, wait)
        context = start_processes(_main, given, world, join=False, daemon=True, start_method="forkserver")
        end = time.monotonic() + time_out
        while not context.join(max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{check.__name__} did not end")
