"""Read and write a LeRobotDataset v3 of vectors (no cameras) with pyarrow alone.

    meta/info.json                               features, counts, splits, path templates
    meta/stats.json                              min, max, mean, std, count and quantiles of every feature
    meta/tasks.parquet                           the task's words, as a pandas index
    meta/episodes/chunk-000/file-000.parquet     a row an episode: length, range of rows, statistics
    data/chunk-000/file-000.parquet              a row a frame, a row group an episode

Source: LeRobotDataset v3.0 as LeRobot 0.6.1 writes and reads it (``lerobot/datasets``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Column = NDArray[Any]

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FIRST = {"chunk_index": 0, "file_index": 0}
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_CHECKED = {"write_page_checksum": True}


def write(
    root: Path,
    episodes: Sequence[Mapping[str, Vectors]],
    *,
    names: Mapping[str, Sequence[str]],
    task: str,
    fps: int,
    robot_type: str,
    splits: Mapping[str, str],
) -> None:
    """Write episodes of vectors, each of shape (length, dimension), into the new folder ``root``.

    Args:
        names: Feature to the names of its dimensions, for every feature of every episode.
        splits: Split to a range of episodes, such as ``{"train": "0:50"}``.
    """
    columns = [_with_indices(episode, number, fps) for number, episode in enumerate(episodes)]
    start = 0
    for frames in columns:
        frames["index"] += start
        start += len(frames["index"])
    for path in ("data/chunk-000", "meta/episodes/chunk-000"):
        (root / path).mkdir(parents=True)

    with pq.ParquetWriter(root / DATA_PATH.format(**FIRST), _table(columns[0]).schema, **_CHECKED) as writer:
        for frames in columns:
            writer.write_table(_table(frames))
    rows = [_episode_row(frames, task) for frames in columns]
    pq.write_table(pa.Table.from_pylist(rows), root / EPISODES_PATH.format(**FIRST), **_CHECKED)
    _write_tasks(root / "meta/tasks.parquet", task)

    whole = {key: np.concatenate([frames[key] for frames in columns]) for key in columns[0]}
    info = {
        "codebase_version": "v3.0",
        "robot_type": robot_type,
        "total_episodes": len(episodes),
        "total_frames": start,
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": dict(splits),
        "data_path": DATA_PATH,
        "video_path": None,
        "features": {key: _feature(column, names.get(key)) for key, column in whole.items()},
    }
    stats = {key: _statistics(column) for key, column in whole.items()}
    (root / "meta/stats.json").write_text(json.dumps(stats, indent=2) + "\n")
    (root / "meta/info.json").write_text(json.dumps(info, indent=2) + "\n")


def read_info(root: Path) -> dict[str, Any]:
    """The contents of ``meta/info.json``."""
    info: dict[str, Any] = json.loads((root / "meta/info.json").read_text())
    return info


def read(root: Path) -> tuple[dict[str, Column], NDArray[np.int64]]:
    """All frames in order, feature to shape (frames,) or (frames, dimension), and the length of each episode.

    Raises:
        ValueError: Files and counts contradict each other.
        OSError: A file is missing, cut off, or has a wrong checksum.
    """
    info = read_info(root)
    data = _read_all(root / "data")
    lengths = _read_all(root / "meta/episodes").column("length").to_numpy().astype(np.int64)
    if not len(data) == lengths.sum() == info["total_frames"] or len(lengths) != info["total_episodes"]:
        raise ValueError(
            f"{root} holds {len(data)} frames where its episodes add up to {lengths.sum()} "
            f"and meta/info.json counts {info['total_frames']}."
        )
    return {key: _column(data.column(key), feature["shape"]) for key, feature in info["features"].items()}, lengths


def _read_all(folder: Path) -> Any:
    files = sorted(folder.glob("*/*.parquet"))
    return pa.concat_tables([pq.read_table(file, page_checksum_verification=True) for file in files])


def _column(chunks: Any, shape: Sequence[int]) -> Column:
    column = chunks.combine_chunks()
    if shape == [1]:
        return np.array(column)
    return np.array(column.flatten()).reshape(-1, *shape)


def _with_indices(episode: Mapping[str, Vectors], number: int, fps: int) -> dict[str, Column]:
    length = len(next(iter(episode.values())))
    frame = np.arange(length, dtype=np.int64)
    return {
        **episode,
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.full(length, number, np.int64),
        "index": frame.copy(),
        "task_index": np.zeros(length, np.int64),
    }


def _table(frames: Mapping[str, Column]) -> Any:
    def array(column: Column) -> Any:
        flat = pa.array(column.reshape(-1))
        return flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, column.shape[1])

    return pa.table({key: array(column) for key, column in frames.items()})


def _episode_row(frames: Mapping[str, Column], task: str) -> dict[str, Any]:
    stats = {key: _statistics(column) for key, column in frames.items()}
    return {
        "episode_index": int(frames["episode_index"][0]),
        "tasks": [task],
        "length": len(frames["index"]),
        "data/chunk_index": 0,
        "data/file_index": 0,
        "dataset_from_index": int(frames["index"][0]),
        "dataset_to_index": int(frames["index"][-1]) + 1,
        **{f"stats/{key}/{name}": value for key, each in stats.items() for name, value in each.items()},
        "meta/episodes/chunk_index": 0,
        "meta/episodes/file_index": 0,
    }


def _write_tasks(path: Path, task: str) -> None:
    # LeRobot reads this file with pandas and looks the words up in the index.
    table = pa.table({"task_index": pa.array([0], pa.int64()), "task": pa.array([task])})
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ],
    }
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path, **_CHECKED)


def _feature(column: Column, names: Sequence[str] | None) -> dict[str, Any]:
    return {
        "dtype": str(column.dtype),
        "shape": list(column.shape[1:] or (1,)),
        "names": None if names is None else list(names),
    }


def _statistics(column: Column) -> dict[str, list[float]]:
    values = column.astype(np.float64).reshape(len(column), -1)
    stats = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        **{name: np.quantile(values, q, axis=0) for name, q in QUANTILES.items()},
    }
    return {**{name: stat.tolist() for name, stat in stats.items()}, "count": [len(values)]}
