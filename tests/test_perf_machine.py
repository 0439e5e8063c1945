"""What the perf suite knows of its machine: GPUs and their names, clocks, cores, and what is measured on it."""

from __future__ import annotations

import os
import subprocess
import types

import pytest
import torch

import primitives
from perf.suite import driver, machine
from perf.suite.plan import Options


def test_each_worker_owns_a_gpu(monkeypatch):
    assert [machine.gpu_of_worker(f"gw{i}", ["2", "5"]) for i in range(4)] == ["2", "5", "2", "5"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, found in {"3,1": ["3", "1"], "": [], "3,1,-1,7": ["3", "1"], None: ["0", "1"]}.items():
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.visible_gpus() == found


WHOLE_UUID = "GPU-b0000000-0000-0000-0000-00000000001C"


@pytest.mark.parametrize(
    "values, identity, hardware",
    [
        ({"uuid": "B0-1c", "pci_domain_id": 0, "pci_bus_id": 101, "pci_device_id": 0}, "b0-1c", "GPU-B0-1c"),
        ({"pci_domain_id": 1, "pci_bus_id": 101, "pci_device_id": 2}, "00000001-65-02-0", "00000001:65:02.0"),
        ({}, None, None),
    ],
)
def test_a_gpu_is_known_by_one_name_however_it_was_asked_for(monkeypatch, values, identity, hardware):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**values))
    found = [machine.gpu_identity(name) for name in ("0", "GPU-B0/1", WHOLE_UUID)]
    assert found == [identity] * 3 if identity else ["0", "b0-1", WHOLE_UUID.lower().removeprefix("gpu-")]
    # What CUDA counts is nothing that nvidia-smi knows a GPU by, and neither is the beginning of a UUID.
    named = [machine.hardware_name(name, 0) for name in ("0", "GPU-B0/1", WHOLE_UUID)]
    assert named == [hardware] * 3 if hardware else [None, None, WHOLE_UUID]


def test_nvidia_smi_is_asked_for_the_gpu_that_cuda_means(monkeypatch):
    """CUDA counts the fastest GPU first, nvidia-smi goes by the bus."""
    uuids = {0: "b", 1: "a"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu_properties(uuid=uuids[index]))
    asked = []

    def run(command, **options):
        asked.append(command[1])
        return types.SimpleNamespace(stdout=", ".join(machine.CLOCKS) + "\n")

    monkeypatch.setattr(machine.shutil, "which", lambda name: "nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", run)
    clocks = {"0": [], "1": []}
    driver._clock_reader(clocks, machine.one_kind(["0", "1"]))()
    assert asked == ["--id=GPU-b", "--id=GPU-a"]
    assert all(clocks.values())


def gpu_properties(**values):
    usual = {"name": "A", "major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 1, "total_memory": 2}
    return types.SimpleNamespace(**{**usual, **values})


def test_a_run_is_of_gpus_of_one_kind(monkeypatch):
    kinds = {0: gpu_properties(uuid="a"), 1: gpu_properties(uuid="b", total_memory=3), 2: gpu_properties(name="B")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", kinds.__getitem__)
    assert machine.one_kind(["5", "3"]) == {"5": "GPU-a", "3": "GPU-b"}
    with pytest.raises(RuntimeError, match=r"must be of one kind, got 5, 3: A, 132 processors; 4: B, 132 processors"):
        machine.one_kind(["5", "3", "4"])
    assert machine.one_kind([]) == {}


def test_cores_are_those_that_the_process_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7, 9, 11}, raising=False)
    assert machine.usable_cores() == machine.environment()["cores"] == 5
    assert driver._compilers(Options("cuda")) == 5 - driver.SPARE_CORES
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.usable_cores() == 64


def test_clocks_are_what_nvidia_smi_says_or_nothing(monkeypatch):
    answers = iter([", ".join(machine.CLOCKS), "one, two"])
    monkeypatch.setattr(machine.shutil, "which", lambda name: "nvidia-smi")

    def run(*args, **kwargs):
        return types.SimpleNamespace(stdout=next(answers) + "\n")

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.clocks("0") == {name: name for name in machine.CLOCKS}
    assert machine.clocks("0") == {}
    assert machine.clocks(None) == {}
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.clocks("0") == {}


def test_the_package_is_known_by_its_revision_or_else_by_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.package() == {"version": primitives.__version__, "revision": None, "dirty": None}
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        settings = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True)
    found = machine.package()
    assert len(found["revision"]) == 40
    assert found["dirty"] is False
    # What lies beside the sources changes nothing that is measured.
    for folder, dirty in (("docs", False), ("perf", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "new.txt").write_text("new")
        assert machine.package()["dirty"] is dirty
