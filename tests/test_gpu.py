"""`./dev gpu`: its checks with made-up machines, what it gathers, and a rehearsal on the CPU with the toy family."""

import dataclasses
import json
import subprocess
import sys

import pytest
from conftest import ROOT, Checkout, assert_fails, copied

from devtools import cuda, portable
from devtools.accelerator import Build, Device, Machine, builds, problems
from devtools.environment import CONSTRAINTS
from devtools.errors import Failure
from devtools.families import Family

KERNELS = portable.pinned(["kernels"], (ROOT / CONSTRAINTS).read_text())[0].split("==")[1]
MACHINE = Machine("2.11.0+cu130", "13.0", (Device("NVIDIA H200", "9.0"),), KERNELS)
BUILD = Build("toy", (2, 11), (13, 0), ("8.0", "9.0"))


def found(machine=MACHINE, build=BUILD, device="cuda"):
    return list(problems(machine, [build] if build else [], ["toy"], device))


def test_nothing_is_wrong_with_a_fitting_machine():
    assert found() == []


@pytest.mark.parametrize(
    "changes, sentence",
    [
        pytest.param({"torch": None}, "has no PyTorch", id="no_torch"),
        pytest.param({"torch": "2.10.1+cu130"}, "PyTorch 2.10.1+cu130 is too old", id="old_torch"),
        pytest.param({"devices": ()}, "there is no CUDA device", id="no_device"),
        pytest.param({"torch": "2.13.0+cpu", "cuda": None, "devices": ()}, "no CUDA device", id="cpu_torch"),
        pytest.param({"cuda": "12.8"}, "comes with CUDA 12.8, but the build of toy needs CUDA 13.0", id="old_cuda"),
        pytest.param({"cuda": "14.0"}, "comes with CUDA 14.0", id="next_cuda"),
        pytest.param({"devices": (Device("V100", "7.0"),)}, "V100 has capability 7.0", id="old_device"),
        pytest.param({"devices": (Device("B200", "10.0"),)}, "--all-architectures", id="new_device"),
        pytest.param({"kernels": "0.10.0"}, f"kernels==={KERNELS}".replace("===", "=="), id="other_kernels"),
        pytest.param({"broken": {"pytest": "ModuleNotFoundError"}}, "pytest (ModuleNotFoundError)", id="no_pytest"),
    ],
)
def test_what_is_wrong_with_a_machine(changes, sentence):
    (wrong,) = found(dataclasses.replace(MACHINE, **changes))
    assert sentence in wrong


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"torch": "3.0.0"}, id="later_torch"),
        pytest.param({"torch": "2.12.0.dev20260101"}, id="nightly_torch"),
        pytest.param({"cuda": "13.4"}, id="later_cuda"),
        pytest.param({"devices": (Device("RTX 4090", "8.9"),)}, id="minor_capability"),
    ],
)
def test_machines_that_serve_too(changes):
    assert found(dataclasses.replace(MACHINE, **changes)) == []


def test_a_build_that_is_missing_or_for_another_device():
    for build in (None, dataclasses.replace(BUILD, cuda=None), dataclasses.replace(BUILD, family="other")):
        (wrong,) = found(build=build)
        assert "no cuda build of toy" in wrong
        assert "copy toy/build" in wrong
    (wrong,) = found(dataclasses.replace(MACHINE, devices=()), device="cpu")
    assert "no cpu build of toy" in wrong
    assert "--device cpu" in wrong


def test_a_build_for_a_later_cuda_than_the_machine_has():
    (wrong,) = found(build=dataclasses.replace(BUILD, cuda=(13, 1)))
    assert "comes with CUDA 13.0, but the build of toy needs CUDA 13.1" in wrong


def test_everything_that_is_wrong_is_told_at_once():
    assert len(found(dataclasses.replace(MACHINE, torch="2.9.0", cuda="12.4", kernels="0.1"))) == 3


@pytest.mark.parametrize(
    "architectures, serves, refuses",
    [
        (("8.0",), ("8.0", "8.6", "8.9"), ("7.5", "9.0")),
        (("9.0a",), ("9.0",), ("9.1", "8.0")),
        (("8.6",), ("8.6", "8.9"), ("8.0",)),
        (("8.0", "12.0+PTX"), ("8.6", "12.0", "13.0"), ("9.0", "10.0")),
    ],
)
def test_architectures_serve_devices(architectures, serves, refuses):
    assert all(cuda.serves(architectures, device) for device in serves)
    assert not any(cuda.serves(architectures, device) for device in refuses)


def test_builds_are_read_from_their_directories(tmp_path):
    backends = {
        "torch-stable-abi211-cpu-x86_64-linux": {"type": "cpu"},
        "torch-stable-abi212-cu130-x86_64-linux": {"type": "cuda", "archs": ["8.0", "9.0"]},
        "torch-stable-abi211-cpu-aarch64-linux": {"type": "cpu"},
    }
    for name, backend in backends.items():
        directory = tmp_path / "toy" / "build" / name
        directory.mkdir(parents=True)
        (directory / "metadata.json").write_text(json.dumps({"backend": backend}))
    assert builds(Family(tmp_path / "toy", {})) == [
        Build("toy", (2, 11), None),
        Build("toy", (2, 12), (13, 0), ("8.0", "9.0")),
    ]


def test_the_closure_follows_every_package_but_those_left_out():
    needs = {"a": ["B_b", "torch"], "b-b": ["c"], "c": ["a"], "unused": []}
    assert portable.closure(["A"], needs.__getitem__, {"torch"}) == ["a", "b-b", "c"]


def test_pins_are_those_of_the_constraints():
    constraints = "# packages\nTyping_Extensions==4.1\nrich==15.0\n"
    assert portable.pinned(["typing-extensions"], constraints) == ["Typing_Extensions==4.1"]
    with pytest.raises(Failure, match="gives no version of pytest"):
        portable.pinned(["rich", "pytest"], constraints)


def test_what_is_gathered_holds_neither_torch_nor_numpy(monkeypatch, tmp_path):
    """With the real requirements, pip replaced by one that notes what it is asked for."""
    asked = []

    def install(command):
        asked.append(command)
        (target,) = (option.removeprefix("--target=") for option in command if option.startswith("--target="))
        package = portable.Path(target) / "package"
        package.mkdir(parents=True)
        version = next(option for option in command if option.startswith("--python-version=")).split("=")[1]
        (package / f"native-{version}.so").write_text(version)

    monkeypatch.setattr(portable, "DIRECTORY", tmp_path)
    monkeypatch.setattr(portable, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(portable, "_MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(portable, "install", install)
    mine = "{}.{}".format(*sys.version_info[:2])
    portable.prepare([mine, "3.99"])
    for command in asked:
        names = {portable.canonical(option.split("==")[0]) for option in command if "==" in option and option[0] != "-"}
        assert {"kernels", "pytest", "pytest-timeout", "hypothesis", "rich", "huggingface-hub", "packaging"} <= names
        assert not names & {"torch", "numpy", "sigstore", "cryptography", "transformers"}
    gathered = sorted(path.name for path in (tmp_path / "packages" / "package").iterdir())
    assert gathered == sorted([f"native-{mine}.so", "native-3.99.so"])
    assert portable.problem() is None
    portable.prepare(["3.99"])
    assert f"for Python 3.99, this is {mine}" in portable.problem()


def test_too_much_to_gather(monkeypatch, tmp_path):
    monkeypatch.setattr(portable, "DIRECTORY", tmp_path)
    monkeypatch.setattr(portable, "LIMIT", 1)
    monkeypatch.setattr(portable, "install", lambda command: fill(command))
    with pytest.raises(Failure, match="more than"):
        portable.prepare(["3.12"])
    assert not (tmp_path / "packages").exists()


def fill(command):
    target = portable.Path(next(option for option in command if option.startswith("--target=")).split("=", 1)[1])
    target.mkdir(parents=True)
    (target / "large.py").write_text("large")


CONFTEST = """\
import os, kernels, pytest
@pytest.fixture(scope="session")
def kernel():
    return kernels.get_kernel("rudnn/rudnn-toy", version=1, trust_remote_code=True)
"""
TESTS = """\
import pytest, torch
def test_right(kernel):
    assert (kernel.add_one(torch.zeros(3)) == 1).all()
@pytest.mark.skip
def test_skipped(): pass
"""
SUITE = """\
import torch
from devtools.benchmarking import Case
def cases(kernel, quick, device):
    x = torch.ones(1000, device=device)
    def case(name, check):
        peers = {"PyTorch": lambda: x + 1}
        return Case(name, "1000", torch.float32, lambda: kernel.add_one(x), peers, check, device=device, bytes=8000)
    yield case("adds", lambda: True)
"""


@pytest.fixture
def rehearsed(built, tmp_path) -> Checkout:
    """A checkout with a toy family that has been built, tests that pass and a benchmark."""
    checkout = copied(built, tmp_path)
    files = {"tests/conftest.py": CONFTEST, "tests/test_toy.py": TESTS, "benchmarks/suite.py": SUITE}
    for name, text in files.items():
        path = checkout.family / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (checkout.root / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return checkout


def gpu(checkout: Checkout, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ./dev gpu with the Python that has PyTorch."""
    command = [sys.executable, checkout.root / "dev", "gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def results(checkout: Checkout) -> dict:
    (path,) = (checkout.family / "benchmarks" / "results").glob("run-*.json")
    return json.loads(path.read_text())


def row(done: subprocess.CompletedProcess[str], name: str) -> str:
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("│ ") and name in line)
    return line


def test_rehearsal(rehearsed):
    done = gpu(rehearsed, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed │ 0 failed │ 1 skipped" in " ".join(row(done, "toy tests").split())
    assert "GB/s" in row(done, "adds")
    told = results(rehearsed)
    assert told["tests"]["count"] == {"passed": 1, "failed": 0, "skipped": 1}
    (result,) = told["results"]
    assert result["times_faster_than"]["PyTorch"] > 0
    assert "copy" in told["machine"]
    (document,) = (rehearsed.family / "benchmarks" / "results").glob("run-*.md")
    assert "| toy tests | 1 passed |" in document.read_text()


def test_red_tests_and_wrong_kernels(rehearsed, tmp_path):
    rehearsed.edit("toy/tests/test_toy.py", "== 1", "== 2")
    rehearsed.edit("toy/benchmarks/suite.py", "lambda: True)", 'lambda: True)\n    yield case("wrong", lambda: False)')
    done = gpu(rehearsed, "--device", "cpu", "--output", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "1 failed" in row(done, "toy tests")
    assert "GB/s" in row(done, "adds")
    assert "WRONG" in row(done, "wrong")
    assert "GB/s" not in row(done, "wrong")
    assert {path.suffix for path in (tmp_path / "out" / "toy").iterdir()} == {".json", ".md"}
    assert not (rehearsed.family / "benchmarks" / "results").exists()


def test_crashes_leave_what_there_was(rehearsed):
    rehearsed.edit(
        "toy/tests/test_toy.py", "def test_right", "def test_crash():\n    import os; os.abort()\ndef test_right"
    )
    rehearsed.edit("toy/benchmarks/suite.py", "lambda: True)", "lambda: True)\n    import os; os.abort()")
    done = gpu(rehearsed, "--device", "cpu")
    assert done.returncode == 1
    assert "1 failed" in row(done, "toy tests")
    assert "GB/s" in row(done, "adds")
    assert done.stdout.count("was ended by SIGABRT") >= 2


def test_what_takes_too_long_is_ended(rehearsed):
    rehearsed.edit("toy/tests/test_toy.py", "def test_right", "def test_hang():\n    while True: pass\ndef test_right")
    rehearsed.edit("toy/benchmarks/suite.py", "lambda: True)", "lambda: True)\n    while True: pass")
    done = gpu(rehearsed, "--device", "cpu", "--minutes", "0.8")
    assert done.returncode == 1
    assert done.stdout.count("was killed") >= 2
    assert "toy tests" in done.stdout


def test_a_machine_without_a_gpu(rehearsed):
    assert_fails(gpu(rehearsed), "there is no CUDA device")
    assert_fails(gpu(rehearsed, "toy"), "there are no cuda sources in toy")


def test_no_cpu_build_to_rehearse(rehearsed):
    (variant,) = (rehearsed.family / "build").iterdir()
    variant.rename(rehearsed.root / "elsewhere")
    assert_fails(gpu(rehearsed, "--device", "cpu"), "there is no cpu build of toy", "--prepare --device cpu")


def test_prepare_refuses_a_python_that_is_none(checkout):
    assert_fails(checkout.dev("gpu", "--prepare", "--device", "cpu", "--python", "cp312"), "such as 3.12, got cp312")
