"""What a disk, a network or a person does to a checkpoint.

Each function does one thing to ``scene.folder``, all of it decided by ``scene.dice``, and returns the files it hurt.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Json = Any
MANIFEST = "manifest.json"


class Scene(NamedTuple):
    """A checkpoint to damage, the one before it, and one of the same step from another run."""

    folder: Path
    before: Path
    foreign: Path
    dice: random.Random

    def files(self, pattern: str = "*") -> list[str]:
        """The names in it, relative to the folder."""
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob(pattern) if p.is_file())

    def pick(self, pattern: str = "*") -> str:
        """One of them; the manifest more often than its share."""
        files = self.files(pattern)
        return MANIFEST if MANIFEST in files and self.dice.random() < 0.2 else self.dice.choice(files)


Damage = Callable[[Scene], list[str]]


def flip(scene: Scene) -> list[str]:
    name = scene.pick()
    change(scene.folder / name, lambda data: flipped(data, scene.dice, scene.dice.randint(1, 3)))
    return [name]


def overwrite(scene: Scene) -> list[str]:
    """A sector of zeros or of noise."""
    name, dice = scene.pick(), scene.dice

    def torn(data: bytes) -> bytes:
        start = dice.randrange(len(data))
        length = min(dice.randint(1, 512), len(data) - start)
        return data[:start] + dice.choice((bytes(length), dice.randbytes(length))) + data[start + length :]

    change(scene.folder / name, torn)
    return [name]


def truncate(scene: Scene) -> list[str]:
    name = scene.pick()
    change(scene.folder / name, lambda data: data[: scene.dice.randrange(len(data))])
    return [name]


def append(scene: Scene) -> list[str]:
    name, dice = scene.pick(), scene.dice
    change(scene.folder / name, lambda data: data + dice.choice((b"\0", b" ", b"}", data, dice.randbytes(100))))
    return [name]


def inflate(scene: Scene) -> list[str]:
    """A terabyte that takes no room on the disk, and would in memory."""
    name = scene.pick()
    os.truncate(scene.folder / name, 2**40)
    return [name]


def empty(scene: Scene) -> list[str]:
    name = scene.pick()
    (scene.folder / name).write_bytes(b"")
    return [name]


def remove(scene: Scene) -> list[str]:
    """A file, or a folder with all that is in it."""
    name = scene.pick()
    if scene.dice.random() < 0.2 and name != MANIFEST:
        folder = str(Path(name).parent)
        shutil.rmtree(scene.folder / folder)
        return [folder]
    (scene.folder / name).unlink()
    return [name]


def swap(scene: Scene) -> list[str]:
    """Two files of this checkpoint."""
    first, second = scene.dice.sample(scene.files(), 2)
    _swap(scene.folder / first, scene.folder / second)
    return [first, second]


def swap_with_before(scene: Scene) -> list[str]:
    """The same file of two checkpoints of the run."""
    name = scene.pick()
    _swap(scene.folder / name, scene.before / name)
    return [name]


def mix_with_before(scene: Scene) -> list[str]:
    """A copy of the checkpoint before, broken off."""
    return _mix(scene, scene.before)


def mix_with_foreign(scene: Scene) -> list[str]:
    """A copy of another run's, broken off."""
    return _mix(scene, scene.foreign)


def replace(scene: Scene) -> list[str]:
    """Something that is no file takes the place of one."""
    name, dice = scene.pick(), scene.dice
    path = scene.folder / name
    outside = scene.folder.parent.parent / "outside"
    outside.write_bytes(dice.choice((path.read_bytes(), b"{}", b"")))
    path.unlink()
    kind = dice.choice(("folder", "pipe", "outside", "itself", "nowhere", "/dev/zero", "/dev/null", "other file"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        other = scene.folder / dice.choice(scene.files())
        path.symlink_to({"outside": outside, "itself": path, "other file": other}.get(kind, Path(kind)))
    return [name]


def replace_folder(scene: Scene) -> list[str]:
    """A folder becomes a file, or a link to the one of another checkpoint."""
    name, dice = _folder(scene), scene.dice
    shutil.rmtree(scene.folder / name)
    target = dice.choice((None, scene.before / name, scene.foreign / name, scene.folder, Path("/")))
    if target is None:
        (scene.folder / name).write_text("{}")
    else:
        (scene.folder / name).symlink_to(target)
    return [name]


def add(scene: Scene) -> list[str]:
    """A file that nobody wrote; a pickle in some of them."""
    dice = scene.dice
    folder = dice.choice(("", "pretrained_model", "training_state"))
    names = ("x.pkl", "pytorch_model.bin", "__init__.py", ".nfs0001", "optimizer_state_1.safetensors", "x.json", "ä\n")
    name = str(Path(folder) / dice.choice(names))
    (scene.folder / name).write_bytes(dice.choice((b"", b"{}", payload())))
    return [name]


def edit(scene: Scene) -> list[str]:
    """Another value in a JSON file, which stays valid."""
    name = scene.pick("*.json")
    value = json.loads((scene.folder / name).read_text())
    write(scene.folder / name, with_extremes(json.dumps(mutated(value, scene.dice)), scene.dice).encode())
    return [name]


def edit_text(scene: Scene) -> list[str]:
    """JSON that parsers read in different ways, or not at all."""
    name, dice = scene.pick("*.json"), scene.dice
    change(scene.folder / name, lambda data: odd_json(data, dice))
    return [name]


DAMAGES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (
        flip, overwrite, truncate, append, inflate, empty, remove, swap, swap_with_before, mix_with_before,
        mix_with_foreign, replace, replace_folder, add, edit, edit_text,
    )
}  # fmt: skip


def payload() -> bytes:
    """A pickle that leaves the folder ``executed`` behind where it is read."""
    return pickle.dumps(_Payload())


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def write(path: Path, content: bytes) -> None:
    """As a new file: some file systems wait for the disk where one is overwritten."""
    path.unlink()
    path.write_bytes(content)


def mutated(value: Json, dice: random.Random) -> Json:
    """The value with one thing in it replaced, renamed, doubled or left out."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return dice.choice(VALUES)
    container, key = dice.choice(places)
    what = dice.choice(("replace", "replace", "replace", "near", "remove", "rename", "repeat"))
    if what == "remove":
        del container[key]
    elif what == "rename" and isinstance(container, dict):
        container[dice.choice((f"{key}_", key.upper(), "$tensor", "$items", "", "__class__"))] = container.pop(key)
    elif what == "repeat" and isinstance(container, list):
        container.append(container[key])
    elif what == "near" and isinstance(container[key], int | float):
        container[key] = dice.choice((container[key] + 1, -container[key], float(container[key]), not container[key]))
    else:
        container[key] = dice.choice(VALUES)
    return value


def _places(value: Json) -> Any:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def change(path: Path, change: Callable[[bytes], bytes]) -> None:
    write(path, change(path.read_bytes()))


def flipped(data: bytes, dice: random.Random, times: int) -> bytes:
    changed = bytearray(data)
    for _ in range(times):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    write(first, other)
    write(second, one)


def _mix(scene: Scene, other: Path) -> list[str]:
    differ = [name for name in scene.files() if (scene.folder / name).read_bytes() != (other / name).read_bytes()]
    scene.dice.shuffle(differ)
    for name in differ[: scene.dice.randint(1, len(differ) - 1)]:
        write(scene.folder / name, (other / name).read_bytes())
    return differ  # where old and new meet, neither is the right one


def _folder(scene: Scene) -> str:
    return scene.dice.choice(sorted(p.name for p in scene.folder.iterdir() if p.is_dir()))


def odd_json(data: bytes, dice: random.Random) -> bytes:
    odd = dice.choice(_ODD)
    first = data.index(b"{") + 1 if b"{" in data else 1
    return dice.choice(
        (
            odd,
            data[:first] + b'"x": ' + odd + b", " + data[first:],
            data[:first] + b'"step": 5, ' + data[first:],  # doubled where there is one
            data.replace(b'"', b"'", 1),
            data.replace(b":", b"=", 1),
            data.replace(b"0", b"0.0", 1),
            data.replace(b"e", b"\\u0065", 1),
            data[:-3] + b"\xff" + data[-3:],
            b"\xef\xbb\xbf" + data,
            data.decode().encode(dice.choice(("utf-16", "utf-32"))),
        )
    )


def with_extremes(text: str, dice: random.Random) -> str:
    """What Python's own writer would not write, in the place of a mark."""
    return text.replace(f'"{_EXTREME}"', dice.choice(("NaN", "Infinity", "1e999", "9" * 5000, "[" * 600 + "]" * 600)))


_EXTREME = "EXTREME"
_ODD = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 100_000, b"01", b"'x'", b'"\\ud800"', b"-0", b"null", b"[]",
    b"{}",
)  # fmt: skip
VALUES: list[Json] = [
    None, True, False, -1, 0, 1, 255, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, "", "x", "os.system",
    "../../secret.json", "/etc/passwd", "\ud800", [], {}, [[]], [0], {"a": 1}, [{"a": [None]}], {"$import": "os"},
    {"class_path": "os.system"}, {"$tensor": "net.0.weight"}, {"$tensor": []}, {"$float": "nan"}, {"$float": "1e3"},
    {"$float": None}, {"$items": 3}, {"$items": [[{"$float": "inf"}, {}]]}, {"$items": [[None, {}]]},
    {"$items": [[[], 1]]}, {"$counter": [["a", "b"]]}, {"$tensor": "x", "$float": "nan"}, _EXTREME, _EXTREME, _EXTREME,
]  # fmt: skip
