"""What a checkpoint says of itself, taken at its word by nobody: JSON that is checked before anything goes by it.

The manifest: {"step": n, "files": {name: checksums}, "matrices": {name: {"shape": [m, n], "dtype": name, "vector":
whether it is a bias or the like, one row for all rows of a batch, "shards": [[file, r0, r1, c0, c1], ...]}}}.
Checksums: {"bytes": n, "crc32": [of each CHUNK bytes]}.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..layout import MATRIX_DTYPES, Box, itemsize
from .disk import chunks

Manifest = dict[str, Any]
DTYPES = (*MATRIX_DTYPES, "int64")
LARGEST = 2**62
"""Of any number in it: beyond what a file system holds."""


def parsed(text: bytes | str, path: Path) -> Any:
    """JSON of a checkpoint's file. Raises CheckpointError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, and of numbers too long to read
        raise CheckpointError(f"{path} is damaged: it holds no JSON: {error}") from None


def checked_sums(sums: Any, path: Path) -> Any:
    """Name -> checksums of files that lie beside this one. Raises CheckpointError for anything else."""
    _need(isinstance(sums, dict), path, "its files have no checksums")
    for name, known in sums.items():
        _need(_is_name(name), path, f"the file {name!r} is not in its folder")
        _need(isinstance(known, dict) and known.keys() == {"bytes", "crc32"} and _are_sizes([known["bytes"]])
              and isinstance(known["crc32"], list) and _are_sizes(known["crc32"])
              and len(known["crc32"]) == chunks(known["bytes"]), path, f"the checksums of {name!r} are none")
    return sums


def checked_manifest(manifest: Any, path: Path) -> Manifest:
    """Raises CheckpointError unless it has what a manifest has, and its shards make its matrices and fit its files."""
    _need(isinstance(manifest, dict) and {"step", "files", "matrices"} <= manifest.keys(), path,
          "its manifest lacks step, files or matrices")
    files, matrices = checked_sums(manifest["files"], path), manifest["matrices"]
    _need(isinstance(matrices, dict), path, "its matrices have no names")
    for name, entry in matrices.items():
        _need(isinstance(entry, dict) and {"shape", "dtype", "shards"} <= entry.keys()
              and isinstance(entry["shards"], list), path, f"{name!r} lacks shape, dtype or shards")
        _need(_are_sizes(entry["shape"], 2) and entry["dtype"] in DTYPES, path,
              f"{name!r} is no matrix: {entry['shape']!r} {entry['dtype']!r}")
        _need(all(_is_shard(shard, entry["shape"], files) for shard in entry["shards"])
              and sum(Box(*edges).size for _, *edges in entry["shards"]) == prod(entry["shape"]), path,
              f"the shards of {name!r} are not those of a {entry['shape'][0]} x {entry['shape'][1]} matrix")
    held = sum(prod(entry["shape"]) * itemsize(entry["dtype"]) for entry in matrices.values())
    _need(held <= sum(known["bytes"] for known in files.values()), path, "its matrices are larger than its files")
    return manifest


def _is_shard(shard: Any, shape: list[int], files: dict[str, Any]) -> bool:
    if not (isinstance(shard, list) and len(shard) == 5 and isinstance(shard[0], str) and shard[0] in files
            and _are_sizes(shard[1:], 4)):
        return False
    r0, r1, c0, c1 = shard[1:]
    return r0 <= r1 <= shape[0] and c0 <= c1 <= shape[1]


def _is_name(name: str) -> bool:
    """Of a file in the same folder."""
    return name not in ("", ".", "..") and not set("/\\\0") & set(name)


def _are_sizes(numbers: Any, length: int | None = None) -> bool:
    return isinstance(numbers, list) and length in (None, len(numbers)) and all(
        type(number) is int and 0 <= number <= LARGEST for number in numbers)


def _need(holds: bool, path: Path, problem: str) -> None:
    if not holds:
        raise CheckpointError(f"{path} is damaged, or not written by pmm3d: {problem}. Take another checkpoint")
