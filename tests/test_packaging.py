"""The wheel holds the whole package and nothing else, and importing it only defines names."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {name: ROOT / folder for name, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()}


def run_python(code: str, *arguments: str, cwd: Path) -> Any:
    """What ``code`` prints as JSON, in a fresh process that starts in another folder."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the setuptools of this environment, so that it needs no network."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS.values():
        shutil.copytree(folder, copy / folder.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "trainer" / "notes.txt").write_text("no part of the package")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_pyproject_lists_every_folder_of_the_package_on_disk() -> None:
    on_disk = {}
    for name in ("policyfit", "policyfit.trainer", "policyfit.strategies", "policyfit.callbacks"):
        for file in FOLDERS[name].rglob("*.py"):
            nested = file.parent.relative_to(FOLDERS[name]).parts
            on_disk[".".join([name, *nested])] = file.parent
    assert on_disk == FOLDERS
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(FOLDERS)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    expected = {"policyfit/py.typed"}
    for name, folder in FOLDERS.items():
        expected |= {f"{name.replace('.', '/')}/{file.name}" for file in folder.glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


INSTALLED = """
import importlib, json, pkgutil, sys
target = sys.argv[1]
sys.path.insert(0, target)
import importlib.metadata, policyfit
modules = [m.name for m in pkgutil.walk_packages(policyfit.__path__, "policyfit.") if m.name != "policyfit.__main__"]
files = [importlib.import_module(name).__file__ for name in modules]
(distribution,) = importlib.metadata.distributions(name="policyfit", path=[target])
print(json.dumps({
    "modules": len(modules),
    "strangers": [file for file in [policyfit.__file__, *files] if not file.startswith(target)],
    "versions": [policyfit.__version__, distribution.version],
    "commands": {e.name: e.load().__module__ for e in distribution.entry_points},
    "bare": [name for name in ("trainer", "strategies", "callbacks") if name in sys.modules],
}))
"""


def test_wheel_works_when_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    found = run_python(INSTALLED, str(target), cwd=tmp_path)
    version = PYPROJECT["project"]["version"]
    modules = sum(1 for folder in FOLDERS.values() for _ in folder.glob("*.py")) - len(["policyfit", "__main__"])
    assert found == {
        "modules": modules,
        "strangers": [],
        "versions": [version, version],
        "commands": {"policyfit": "policyfit.trainer.cli"},
        "bare": [],
    }


def test_wheel_asks_for_torch_without_upper_bound_or_index(metadata: Message) -> None:
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    (torch,) = [r for r in needed if r.name == "torch"]
    assert [s.operator for s in torch.specifier] == [">="]
    assert (torch.url, torch.marker, torch.extras) == (None, None, set())
    assert not [r.name for r in needed if r.url]


def test_wheel_names_its_licence_and_python(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"


HEAVY = [
    "accelerate", "gymnasium", "jsonargparse", "lightning", "lightning_fabric", "metaworld", "mujoco", "pyarrow",
    "pytorch_lightning", "rich", "yaml",
]  # fmt: skip

IMPORT = """
import json, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch
import torch.distributed, torch.optim, torch.utils.data, safetensors.torch

def process():
    tasks = "/proc/self/task"
    return {
        "threads": [threading.active_count(), len(os.listdir(tasks)) if os.path.isdir(tasks) else 0],
        "children": len(multiprocessing.active_children()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGINT)],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "warnings": [str(f) for f in warnings.filters],
        "streams": [str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()],
        "process group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "torch": [
            str(torch.get_default_dtype()), str(torch.get_default_device()), torch.is_grad_enabled(),
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled,
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32,
        ],
    }

before = process()
import policyfit
after = process()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "heavy": [name for name in sys.argv[1:] if name in sys.modules],
}))
"""


WITHOUT_DISTRIBUTED = """
import contextlib, json, sys

class Without:
    \"\"\"Takes from torch what a build without torch.distributed does not have.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(sys.modules["torch._C"]).pop(part, None)
        if name == "torch._C._distributed_c10d":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Without())
import torch
import policyfit

class Policy(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

policy = Policy(2, 1)
trainer = policyfit.Trainer("cpu", max_steps=3, batch_size=2, run_dir="run")
with contextlib.redirect_stdout(sys.stderr):
    trainer.fit(policy, [torch.ones(2) for _ in range(4)])
loaded = policyfit.load("run", policy=Policy(2, 1))
print(json.dumps([torch.distributed.is_available(), trainer.step, bool((loaded.weight == policy.weight).all())]))
"""


def test_torch_that_is_built_without_collectives_trains_and_acts(tmp_path: Path) -> None:
    assert run_python(WITHOUT_DISTRIBUTED, cwd=tmp_path) == [False, 3, True]


def test_importing_policyfit_only_defines_names(tmp_path: Path) -> None:
    assert run_python(IMPORT, *HEAVY, cwd=tmp_path) == {"changed": [], "heavy": []}
