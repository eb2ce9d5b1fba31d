"""Where a run that was killed and resumed is not the run that was never killed, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

Record = dict[str, Any]
#: The micro-batches and updates of a run by their numbers.
Reference = dict[str, dict[int, Record]]


def records(log: Path) -> list[Record]:
    """What a diary holds."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def reference_of(log: Path) -> Reference:
    """The diary of an uninterrupted run, for comparing."""
    return {kind: {r["number"]: r for r in records(log) if r["kind"] == kind} for kind in ("batch", "update")}


def left_of_saves(run_dir: Path) -> set[str]:
    """What saves that did not come to their end have left."""
    return {path.name for path in (run_dir / "checkpoints").glob(".*")}


def differing_diary(log: Path, reference: Reference, newest: int, *, killed: bool) -> list[str]:
    """Where an attempt is not the part of the uninterrupted run that it should be.

    Args:
        log: Its diary.
        reference: That of the uninterrupted run.
        newest: The step that it should go on from.
        killed: Whether it may end before the run's end.
    """
    written = records(log)
    start = next((r for r in written if r["kind"] == "start"), None)
    if start is None:
        return ["samples were read before on_fit_start"] if written else []
    found = [] if start["step"] == newest else [f"resumed from step {start['step']}, but {newest} was complete"]
    for record in written:
        expected = reference.get(record["kind"], {}).get(record.get("number", 0), record)
        if record != expected:
            found.append(f"{record}\n    instead of {expected}")
            break  # what follows differs too
    remaining = {number: record for number, record in reference["batch"].items() if number > start["micro_batches"]}
    trained = [r["number"] for r in written if r["kind"] == "batch"]
    if trained != list(remaining)[: len(trained) if killed else None]:
        found.append(f"trained micro-batches {trained} instead of {list(remaining)}")
    read = Counter((r["epoch"], r["index"]) for r in written if r["kind"] == "read")
    unseen = Counter((r["epoch"], index) for r in remaining.values() for index in r["ids"])
    if read - unseen or (unseen - read and not killed):
        found.append(f"read {dict(read - unseen)} too often and {dict(unseen - read)} never (epoch, sample)")
    return found


def differing_ends(folder: Path, reference: Path) -> list[str]:
    """Which parts of the state at the end, of the last checkpoint and of the log are not those of the reference."""
    last = folder / "run" / "checkpoints" / "last"
    found = _differing_files(folder / "end", reference / "end", "*")
    found += [f"last/{what}" for what in _differing_files(last, reference / "end", "*.safetensors")]
    lines, straight = (_log(f / "run" / "metrics.jsonl") for f in (folder, reference))
    if lines != straight:
        where = next((i for i, (a, b) in enumerate(zip(lines, straight, strict=False)) if a != b), len(straight))
        pair = f"{lines[where : where + 1]}\n    instead of {straight[where : where + 1]}"
        found.append(f"metrics.jsonl has {len(lines)} lines instead of {len(straight)}: {pair}")
    names = [path.name for path in last.parent.iterdir()]
    if len(names) > 4 or left_of_saves(folder / "run"):  # the newest two, the best and last
        found.append(f"left {names} in checkpoints")
    return found


def _differing_files(own: Path, theirs: Path, pattern: str) -> list[str]:
    names, expected = ({str(p.relative_to(f)) for p in f.rglob(pattern) if p.is_file()} for f in (own, theirs))
    found = [f"{name} is in one of {own} and {theirs}" for name in sorted(names ^ expected)]
    for name in sorted(names & expected):
        if (own / name).read_bytes() != (theirs / name).read_bytes():
            a, b = (dict(_leaves(folder / name)) for folder in (own, theirs))
            found += [f"{name}: {k} is {a.get(k)} instead of {b.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k)]
    return found


def _leaves(file: Path) -> Iterator[tuple[str, Any]]:
    """The values in a file by their paths: of JSON without what may differ; of a tensor a hash of its bytes."""
    if file.suffix == ".json":
        yield from _walk(_lasting(json.loads(file.read_text())), "")
        return
    with safe_open(file, framework="np") as tensors:
        yield from _walk(tensors.metadata(), "metadata")
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            value = tensors.get_tensor(name)
            yield name, (str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()[:12])


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, v in value.items():
            yield from _walk(v, f"{path}/{key}")
    else:
        yield path, value


def _log(path: Path) -> list[Any]:
    """The lines of metrics.jsonl without notes, which are said at every start."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [_lasting(line) for line in lines if line.get("event") != "note"]


def _lasting(value: Any) -> Any:
    """Without the id of the run and speeds, and without the hashes of the files that hold them."""
    if isinstance(value, dict):
        passing = {"run", "files", "sha256", *(key for key in value if key.endswith("_per_s"))}
        return {key: _lasting(v) for key, v in value.items() if key not in passing}
    return [_lasting(v) for v in value] if isinstance(value, list) else value
