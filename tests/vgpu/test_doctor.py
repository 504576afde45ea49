"""`vgpu doctor`: what it says, and what it finds wrong."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch  # before `found` hides its entry points
from programs import ROOT, vgpu

from vgpu.cuda import doctor
from vgpu.other_programs import CpuShares

REFUSAL = doctor.refusal_reason


@pytest.fixture
def found(monkeypatch, capsys):
    """Return a function that looks and returns what is wrong, a dict from names to texts."""
    points = [SimpleNamespace(name="vgpu")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(doctor, "cores_of_this_process", lambda: 4)
    monkeypatch.setattr(doctor, "memory_of_this_process", lambda: 2**34)
    monkeypatch.setattr(doctor, "LAB", ("pytest",))
    monkeypatch.setattr(doctor, "measure_cpu_shares", CpuShares)
    monkeypatch.setattr(doctor, "refusal_reason", lambda: "")  # it would take seconds
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0.28.0"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**34))

    def look():
        is_wrong = doctor.examine()
        printed = capsys.readouterr().out.splitlines()
        lines = [re.fullmatch(r"! (.{14})(.*)", line) for line in printed]
        wrong = {line[1].strip(): line[2] for line in lines if line}
        assert is_wrong == bool(wrong)
        return wrong

    return look


@pytest.mark.parametrize(
    ("target", "value", "wrong", "text"),
    [
        ("vgpu.cuda.doctor.cores_of_this_process", lambda: 1, "cores", "1 of"),
        ("vgpu.cuda.doctor.memory_of_this_process", lambda: 2**31, "memory", "2.0 .* need 4 GiB"),
        ("vgpu.cuda.doctor.LAB", ("pytest", "no_such"), "notebooks", "no_such missing"),
        ("torch.__version__", "2.99.0", "torch", "2.99.0"),
        ("torch.__version__", "2.9.1", "torch", "2.9.1"),
        ("platform.python_implementation", lambda: "PyPy", "Python", "this is PyPy"),
        ("torch.distributed.is_available", lambda: False, "processes", "launch cannot work"),
        ("torch.distributed.is_gloo_available", lambda: False, "processes", "launch needs gloo"),
        ("importlib.metadata.entry_points", lambda group: [], "entry point", "install the package"),
    ],
)
def test_what_is_wrong_is_said(found, monkeypatch, capsys, target, value, wrong, text):
    monkeypatch.setattr(target, value)
    said = found()
    assert list(said) == [wrong] and re.search(text, said[wrong])
    assert doctor.examine() == 1
    assert "1 of these are wrong" in capsys.readouterr().out


def test_a_busy_machine(found, monkeypatch, capsys):
    taken = CpuShares()
    taken.seconds, taken.others, taken.stolen = 0.2, 0.12, 0.04
    monkeypatch.setattr(doctor, "measure_cpu_shares", lambda: taken)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("VGPU_THREADS", "3")
    assert doctor.examine() == 1
    out = capsys.readouterr().out
    assert "disabled here by TORCH_DEVICE_BACKEND" in out and "a virtual GPU 3 (VGPU_TH" in out
    for who in ("other programs took 60 % of", "the hypervisor took 20 % of"):
        assert f"! busy          {who} the cores just now: measured times" in out
    assert "2 of these are wrong" in out


def test_what_is_missing_and_not_wrong_is_said(found, monkeypatch, capsys):
    """On another machine, where notebooks work."""
    monkeypatch.setattr("vgpu.private.virtual_tables.can_answer_without_python", lambda: False)
    monkeypatch.setattr(doctor, "refusal_reason", lambda: "no such machine")
    monkeypatch.setattr(doctor, "LAB", ("no_such_package",))
    assert found() == {}
    assert doctor.examine() == 0
    out = capsys.readouterr().out
    assert "vgpu run      not on" in out and out.endswith("nothing is wrong\n")
    assert "notebooks     not installed; in a clone: pip install '.[lab]'" in out


def test_a_torchvision_of_another_build_or_none(found, monkeypatch, tmp_path, capsys):
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    error = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({error!r})")
    said = found()
    assert list(said) == ["torchvision"] and error in said["torchvision"]
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    monkeypatch.setattr("torch.version.cuda", None)
    assert re.search(r" torch==2\.15\.0 torchvision --index-url \S+/cpu$", found()["torchvision"])
    monkeypatch.setattr("torch.version.cuda", "12.9")
    assert "--index-url" not in found()["torchvision"]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert found() == {}
    doctor.examine()
    assert "torchvision   not installed" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["shared memory", "disk"])
def test_full_disks(found, monkeypatch, wrong):
    full = tempfile.gettempdir() if wrong == "disk" else "/dev/shm"
    free = {full: 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda p: SimpleNamespace(free=free.get(p, 2**34)))
    assert list(found()) == [wrong] * os.path.exists(full)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("VGPU_CUDA", "vgpu:2")  # as under `vgpu run`
    done = vgpu(tmp_path, "doctor")
    assert done.returncode in (0, 1) and not done.stderr
    assert "\n  vgpu run" in done.stdout, "it works here"
    names = [line[2:16].strip() for line in done.stdout.splitlines()]
    assert {"Python", "cores", "memory", "disk", "torch", "GPUs", "kernels"} <= set(names)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="machine code is known for Linux on x86-64 and 64-bit ARM",
)
@pytest.mark.slow
def test_a_system_that_denies_executable_pages(found, monkeypatch, tmp_path):
    """Which a process of its own finds out, whose mmap refuses them."""
    (tmp_path / "sitecustomize.py").write_text("import mmap; mmap.MAP_PRIVATE = 0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    said = REFUSAL()
    assert "the system denies executable pages" in said
    monkeypatch.setattr(doctor, "refusal_reason", lambda: said)
    assert said in found()["vgpu run"]
