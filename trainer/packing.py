"""Nested values and tensors as what inert files can hold: JSON values and flat tensors, and back.

What JSON cannot say is an object with one key that starts with ``$``: ``{"$tensor": name}`` (a tensor of the
file beside it), ``{"$float": "nan"}``, ``{"$items": [[key, value], ...]}`` (a mapping whose keys are not all
plain strings) and ``{"$counter": [[key, count], ...]}`` (MultiStepLR has one). Tuples come back as lists.
Nothing that is read is imported, called or unpickled.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..strategies.errors import CheckpointError


def pack(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """``value`` as JSON values, and the tensors in it by the path to them, such as ``state/0/exp_avg``.

    Raises:
        CheckpointError: Something in it is neither a JSON value nor a tensor; the message names its path.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, path, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # "a/b" and "a" -> "b" have the same path
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_pack(v, _join(path, i), tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not (key is None or isinstance(key, (bool, int, float, str))):
                raise CheckpointError(
                    f"{path or 'The state'} has the key {key!r}, which a checkpoint cannot keep.\n"
                    "Use strings or numbers as keys."
                )
        packed = [(key, _pack(v, _join(path, key), tensors)) for key, v in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[_pack(key, path, {}), v] for key, v in packed]}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(packed)
        return {"$items": [[_pack(key, path, {}), v] for key, v in packed]}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path or 'The state'} is a {kind}, which a checkpoint cannot keep.\n"
        "Give numbers, strings, None, lists and dictionaries of them, or tensors."
    )


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``pack`` was given. Raises ValueError where the two do not fit together."""
    named: list[str] = []
    try:
        value = _unpack(packed, tensors, named)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if sorted(named) != sorted(tensors):
        raise ValueError("its tensors are not those of the file beside it")
    return value


def _unpack(packed: Any, tensors: Mapping[str, Tensor], named: list[str]) -> Any:
    if isinstance(packed, list):
        return [_unpack(v, tensors, named) for v in packed]
    if not isinstance(packed, dict):
        return packed
    if not any(key.startswith("$") for key in packed):
        return {key: _unpack(v, tensors, named) for key, v in packed.items()}
    try:
        ((mark, content),) = packed.items()
        if mark == "$tensor":
            named.append(content)
            return tensors[content]
        if mark == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if mark in ("$items", "$counter"):
            items = {_unpack(k, tensors, named): _unpack(v, tensors, named) for k, v in content}
            return items if mark == "$items" else Counter(items)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(packed)[:60]} cannot be read") from error
    raise ValueError(f"{str(packed)[:60]} cannot be read")


def dumps(value: Any) -> str:
    """JSON text of packed values, in their order."""
    return json.dumps(value, allow_nan=False, indent=2)


def loads(text: str | bytes) -> Any:
    """Packed values of a JSON text. Raises ValueError when it is not strict JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def lay_flat(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Contiguous tensors on the cpu that share no memory, and how to make the originals of them again.

    Strides are kept: fused Adam on the cpu walks weights and moments as flat memory, so moments that come
    back in another memory format than their ``channels_last`` weights corrupt the run (torch 2.13).
    """
    flat: dict[str, Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    taken: set[int] = set()
    aliases: dict[str, str] = {}
    strides: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}, which a checkpoint cannot keep.\n"
                "Give dense tensors that hold values."
            )
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(identity, name) != name:
            aliases[name] = first[identity]
            continue
        stride = torch.empty_like(tensor, device="meta").stride()
        if stride != torch.empty(tensor.shape, device="meta").stride():
            strides[name] = list(stride)
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        taken.add(plain.untyped_storage().data_ptr())
        flat[name] = plain
    layout = {"aliases": aliases, "strides": strides}
    return flat, {key: value for key, value in layout.items() if value}


def lay_out(flat: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that ``lay_flat`` was given. Raises ValueError where the layout is not one of them."""
    tensors = dict(flat)
    try:
        for name, stride in layout.get("strides", {}).items():
            tensor = tensors[name]
            whole = all(type(s) is int for s in stride)  # a text would be repeated as often as the shape says
            if not whole or 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)) != tensor.numel():
                raise ValueError(f"the strides of {name} do not fit its shape")
            tensors[name] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        for name, kept in layout.get("aliases", {}).items():
            tensors[name] = tensors[kept]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its layout in the manifest cannot be read ({error})") from error
    return tensors
