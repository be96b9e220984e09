"""Vectors of environments that are packages of other libraries: their rows and their random streams."""

from __future__ import annotations

import hashlib
from typing import Any

from vectors_world import case

from nous_node.envs.random_streams import stream_seed
from nous_node.envs.verifiers_v0 import row_of

SEEDS = (bytes(32), bytes([255] * 32), hashlib.sha256(b"a task").digest())


def packages() -> list[dict[str, Any]]:
    return [*_rows(), *_streams()]


def _rows() -> list[dict[str, Any]]:
    return [
        case(
            f"seed {seed[:2].hex()}..., {rows} rows",
            "VFR-2",
            "valid row",
            seed=seed.hex(),
            rows=rows,
            row=row_of(seed, rows),
        )
        for seed in SEEDS
        for rows in (1, 7, 1 << 20)
    ]


def _streams() -> list[dict[str, Any]]:
    return [
        case(f"seed {seed[:2].hex()}...", "VFR-3", "valid stream", seed=seed.hex(), start=stream_seed(seed))
        for seed in SEEDS
    ]
