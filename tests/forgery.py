"""What an attacker does to a checkpoint: damage whose sizes, hashes and seal are made to fit afterwards.

Each function works as those of ``damage`` do.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from damage import (
    MANIFEST,
    VALUES,
    Damage,
    Scene,
    change,
    edit,
    flipped,
    mutated,
    odd_json,
    payload,
    with_extremes,
    write,
)

from policyfit.trainer.manifest import seal


def forged_flip(scene: Scene) -> list[str]:
    """Bits of a file, half of them in its first bytes, where the header of a safetensors file is."""
    name, dice = scene.pick("*/*"), scene.dice

    def forge(data: bytes) -> bytes:
        start = data[:600] if dice.random() < 0.5 else data
        return flipped(start, dice, dice.randint(1, 3)) + data[len(start) :]

    change(scene.folder / name, forge)
    reseal(scene.folder, name)
    return [name]


def forged_edit(scene: Scene) -> list[str]:
    hurt = edit(scene)
    reseal(scene.folder, *hurt)
    return hurt


def forged_text(scene: Scene) -> list[str]:
    name, dice = scene.pick("*/*.json"), scene.dice
    change(scene.folder / name, lambda data: odd_json(data, dice))
    reseal(scene.folder, name)
    return [name]


def forged_header(scene: Scene) -> list[str]:
    """A safetensors file whose header says other things about the bytes that follow."""
    name, dice = scene.pick("*/*.safetensors"), scene.dice

    def forge(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        entry = header[dice.choice(sorted(header))]
        if "shape" in entry and dice.random() < 0.6:
            key = dice.choice(("dtype", "shape", "data_offsets"))
            entry[key] = dice.choice(_ENTRIES[key])
            if dice.random() < 0.3:  # a shape without an element needs no bytes
                entry["data_offsets"] = [0, 0]
        else:
            header = mutated(header, dice)
        text = with_extremes(json.dumps(header), dice).encode()
        length = dice.choice((len(text),) * 6 + (0, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + text + body

    change(scene.folder / name, forge)
    reseal(scene.folder, name)
    return [name]


def forged_optimizer(scene: Scene) -> list[str]:
    """What the metadata of a safetensors file says of an optimizer."""
    name, dice = "training_state/optimizer_state.safetensors", scene.dice

    def forge(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        state = json.loads(header["__metadata__"]["state"])
        key: Any = dice.choice((None, -1, 0.5, "x", [], {"$float": "inf"}, {"$float": "nan"}))
        numbered = {"$items": [*map(list, state.items()), [key, {}]]}
        said = dice.choice((numbered, mutated(state, dice), dice.choice(VALUES)))
        header["__metadata__"]["state"] = with_extremes(json.dumps(said), dice)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    change(scene.folder / name, forge)
    reseal(scene.folder, name)
    return [name]


def forged_layout(scene: Scene) -> list[str]:
    """The manifest lays tensors out in memory in another way."""
    dice = scene.dice
    manifest = json.loads((scene.folder / MANIFEST).read_text())
    name = scene.pick("*/*.safetensors")
    tensors = tensor_names(scene.folder / name)
    picked: Any = {dice.choice([*tensors, "none"]): dice.choice(_STRIDES) for _ in range(dice.randint(1, 3))}
    aliases: Any = {dice.choice([*tensors, "none"]): dice.choice([*tensors, "none", None, [], 3])}
    manifest["layouts"][name] = dice.choice(({"strides": picked}, {"aliases": aliases}, mutated(picked, dice)))
    write_manifest(scene.folder, manifest)
    return [MANIFEST, name]


def forged_name(scene: Scene) -> list[str]:
    """The manifest lists a file that is not for it to list; there is one, with that size and hash."""
    dice = scene.dice
    manifest = json.loads((scene.folder / MANIFEST).read_text())
    name = dice.choice(_NAMES).replace("ABSOLUTE", str(scene.before))
    place = scene.folder / name
    if "\0" not in name and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(dice.choice((payload(), b"{}", b"[]")))
    content = place.read_bytes() if "\0" not in name and place.is_file() else b""
    taken = dice.choice((None, *manifest["files"]))  # instead of one, or besides
    manifest["files"].pop(taken, None)
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(scene.folder, manifest)
    return [MANIFEST, name]


def forged_special_file(scene: Scene) -> list[str]:
    """A pipe or a device in the place of a file, with its size."""
    name = scene.pick("*/*")
    path = scene.folder / name
    path.unlink()
    if scene.dice.random() < 0.5:
        os.mkfifo(path)
    else:
        path.symlink_to(scene.dice.choice(("/dev/zero", "/dev/random")))
    manifest = json.loads((scene.folder / MANIFEST).read_text())
    manifest["files"][name]["size"] = path.stat().st_size
    write_manifest(scene.folder, manifest)
    return [name]


FORGERIES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (
        forged_flip, forged_edit, forged_text, forged_header, forged_optimizer, forged_layout, forged_name,
        forged_special_file,
    )
}  # fmt: skip


def reseal(folder: Path, name: str) -> None:
    """Size, hash and seal after a change of one file, as somebody would who can compute them."""
    content = (folder / name).read_bytes()
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if name != MANIFEST:
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        write_manifest(folder, manifest)
    except (TypeError, ValueError):  # now the manifest is no mapping, or no JSON
        return


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """The manifest with the seal that belongs to it."""
    write(folder / MANIFEST, json.dumps({**manifest, "sha256": seal(manifest)}).encode())


def tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return sorted(set(json.loads(file.read(length))) - {"__metadata__"})


_STRIDES: list[Any] = [
    [], [0], [1], [0, 0], [0, 1], [1, 2], [1, -1], [2**62, 1], [2**70, 1], [1, 2**63], ["a", "b"], ["aaaa"], [None],
    [[1]], [1.0, 1.0], [True], "ab", 3, None, {}, {"a": 1}, [0, 5, 1, 1], [1, 1, 1, 1], [4, 1, 2, 1],
]  # fmt: skip
_ENTRIES: dict[str, list[Any]] = {
    "dtype": ["F64", "F16", "BF16", "I8", "U8", "BOOL", "U64", "I64", "C64", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3",
              "F128", "", "object", None, 3],
    "shape": [[], [0], [1], [-1], [2**62], [2**32, 2**32], [0, 2**62], [0, 2**63], [2**64 - 1, 0], [1] * 70, [1] * 2000,
              [2.0], "3", None, [None], [[3]], [0, 2**40, 2**40]],
    "data_offsets": [[0, 0], [0, 1], [8, 4], [0, 2**63], [2**64 - 1, 3], [-4, 0], [0], [], None, [0, 4, 8], "04",
                     [0.0, 4.0]],
}  # fmt: skip
_NAMES = [
    "../000002/training_state/rng_state.safetensors", "../../outside.json", "ABSOLUTE/pretrained_model/config.json",
    "training_state/../../../outside.json", "training_state/./x.json", "training_state//x.json", "other/x.json",
    "training_state/x.pkl", "training_state/x.pt", "training_state/x.json.pkl", "training_state/sub/x.json", "x.json",
    "pretrained_model/pytorch_model.bin", "pretrained_model/code.py", "training_state/x.json\n", "manifest.json",
    "training_state/x.json\0", "training_state\\x.json", "training_state/ä.json", "training_state/unknown.json",
    "pretrained_model_/x.json", "pretrained_model_EMA/x.json", "pretrained_model_ema/../../000002/manifest.json",
    "training_state/optimizer_state_2.safetensors", "pretrained_model_other/model.safetensors",
]  # fmt: skip
