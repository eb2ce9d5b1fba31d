"""Imports point one way, names have one spelling, and a few calls have no place in the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "strategies": {"strategies"},
    "callbacks": {"callbacks", "strategies"},
    "trainer": {"trainer", "callbacks", "strategies"},
}
LAYERS = tuple(MAY_IMPORT)
LAYER_FILES = sorted(f for layer in LAYERS for f in (ROOT / layer).rglob("*.py"))
OUTER_FILES = sorted(f for folder in ("src", "tests", "examples", "benchmarks") for f in (ROOT / folder).rglob("*.py"))
FORBIDDEN_MODULES = ("torch.cuda.amp", "torch.cpu.amp", "pickle", "cloudpickle", "dill", "marshal", "shelve")


class Import(NamedTuple):
    """One imported module, as an absolute name where it is relative in the file."""

    module: str
    line: int
    relative: bool
    for_types: bool
    in_function: bool


def imports(source: str, package: str = "") -> Iterator[Import]:
    """Every import of a file; ``package`` is the import name of its folder."""
    yield from _imports(ast.parse(source), package, for_types=False, in_function=False)


def _imports(node: ast.AST, package: str, *, for_types: bool, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, False, for_types, in_function)
        elif isinstance(child, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:  # from . import state  imports a module too
                yield Import(f"{module}.{alias.name}", child.lineno, child.level > 0, for_types, in_function)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(child, package, for_types=True, in_function=in_function)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, for_types=for_types, in_function=in_function or inside)


def layer_faults(source: str, layer: str, package: str) -> Iterator[str]:
    """What a file of one of the three folders imports and must not."""
    for found in imports(source, package):
        top, _, rest = found.module.partition(".")
        if top == "policyfit":
            target = rest.partition(".")[0]
            if not found.relative:
                yield f"line {found.line}: {found.module} is imported by its absolute name"
            if target not in MAY_IMPORT[layer] and not (
                target == "trainer" and layer == "callbacks" and found.for_types
            ):
                yield f"line {found.line}: {layer} imports {found.module}, which lies above it"
        elif top in LAYERS:
            yield f"line {found.line}: {found.module} is a bare folder name"
        elif (
            layer == "strategies"
            and top not in {"torch", "numpy", *sys.stdlib_module_names}
            and not (top == "accelerate" and found.in_function)
        ):
            yield f"line {found.line}: strategies imports {found.module}"


def outer_faults(source: str) -> Iterator[str]:
    """What a file outside the three folders imports and must not."""
    for found in imports(source):
        if found.relative:
            yield f"line {found.line}: a relative import"
        elif found.module.partition(".")[0] in LAYERS:
            yield f"line {found.line}: {found.module} is a bare folder name; import policyfit.{found.module}"


def call_faults(source: str) -> Iterator[str]:
    """Calls and modules that the package does not use: each hides a device or runs code that lies in a file."""
    for found in imports(source):
        for module in FORBIDDEN_MODULES:
            if f"{found.module}.".startswith(f"{module}."):
                yield f"line {found.line}: {module}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_MODULES:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name.endswith("autocast"):
            devices = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "device_type")]
            if any(isinstance(d, ast.Constant) for d in devices):
                yield f"line {node.lineno}: autocast of one device by name"
        if name == "torch.load" and keywords.get("weights_only") != "True":
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if name.endswith("load") and keywords.get("allow_pickle") == "True":
            yield f"line {node.lineno}: allow_pickle=True"


def package_of(file: Path) -> str:
    """The import name of the folder that holds a file of the three."""
    return ".".join(["policyfit", *file.relative_to(ROOT).parent.parts])


def faults_by_file(files: list[Path], check: Callable[[Path], Iterator[str]]) -> dict[str, list[str]]:
    """The faults of each file that has some."""
    assert files
    found = {str(file.relative_to(ROOT)): list(check(file)) for file in files}
    return {file: faults for file, faults in found.items() if faults}


def test_layers_import_only_what_lies_below_them() -> None:
    def check(file: Path) -> Iterator[str]:
        return layer_faults(file.read_text(), file.relative_to(ROOT).parts[0], package_of(file))

    assert faults_by_file(LAYER_FILES, check) == {}


def test_files_outside_the_layers_import_them_by_their_full_names() -> None:
    assert faults_by_file(OUTER_FILES, lambda file: outer_faults(file.read_text())) == {}


def test_package_names_no_device_in_autocast_and_unpickles_nothing() -> None:
    assert faults_by_file(LAYER_FILES, lambda file: call_faults(file.read_text())) == {}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("callbacks", "from ..trainer.trainer import Trainer"),
        ("callbacks", "def f():\n    from ..trainer import load"),
        ("strategies", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..trainer.run import Run"),
        ("strategies", "from ..callbacks.callback import Callback"),
        ("strategies", "import accelerate"),
        ("strategies", "def f():\n    import rich"),
        ("trainer", "from policyfit.strategies import probe"),
        ("trainer", "from .. import __version__"),
        ("trainer", "import strategies.facts"),
    ],
)
def test_layer_check_finds_a_wrong_import(layer: str, source: str) -> None:
    assert len(list(layer_faults(source, layer, f"policyfit.{layer}"))) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("callbacks", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..trainer.run import Run"),
        ("callbacks", "from ..strategies.errors import ConfigError\nfrom . import hooks"),
        ("strategies", "import os\nimport torch.distributed\ndef f():\n    from accelerate import Accelerator"),
        ("trainer", "from . import state\nfrom ..callbacks.callback import Callback\nimport rich"),
    ],
)
def test_layer_check_accepts_imports_that_point_down(layer: str, source: str) -> None:
    assert list(layer_faults(source, layer, f"policyfit.{layer}")) == []


def test_layer_check_follows_relative_imports_out_of_a_nested_folder() -> None:
    source = "from ...callbacks.hooks import HOOKS\nfrom ..mixed import FP16"
    assert [i.module for i in imports(source, "policyfit.strategies.nested")] == [
        "policyfit.callbacks.hooks.HOOKS",
        "policyfit.strategies.mixed.FP16",
    ]


@pytest.mark.parametrize("source", ["from .toys import mlp", "import trainer", "from callbacks.hooks import HOOKS"])
def test_outer_check_finds_a_wrong_import(source: str) -> None:
    assert len(list(outer_faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.cuda.amp",
        "from torch.cuda import amp",
        "scaler = torch.cuda.amp.GradScaler()",
        "with torch.autocast('cuda'): ...",
        "with torch.amp.autocast(device_type='cpu', dtype=d): ...",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_call_check_finds_what_has_no_place_in_the_package(source: str) -> None:
    assert len(list(call_faults(source))) == 1


def test_call_check_accepts_autocast_of_the_run_s_own_device() -> None:
    assert list(call_faults("with torch.autocast(self.device_type, dtype=d): torch.load(p, weights_only=True)")) == []
