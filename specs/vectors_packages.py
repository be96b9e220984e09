"""Vectors of environments that are packages of other libraries: their rows and their random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from vectors_world import case

from nous_node.envs.random_streams import stream_seed
from nous_node.envs.verifiers_v0 import row_of
from nous_node.envs.verifiers_v0_config import read_choices
from nous_node.envs.verifiers_v1 import read_config
from nous_node.protocol.runs import Setting

SEEDS = (bytes(32), bytes([255] * 32), hashlib.sha256(b"a task").digest())


def packages() -> list[dict[str, Any]]:
    return [*_rows(), *_streams(), *_configs()]


def _rows() -> list[dict[str, Any]]:
    return [
        case(
            f"seed {seed[:2].hex()}..., {rows} rows",
            "VFR-2 VFR-7",
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


INTERFACES = {"VFR-1": "v0", "VFR-6": "v1"}
Reader = Callable[[Mapping[str, Setting]], tuple[object, dict[str, Any]]]


def _configs() -> list[dict[str, Any]]:
    valid: list[tuple[str, str, dict[str, Any]]] = [
        ("nothing", "VFR-1", {}),
        ("arguments of the package", "VFR-1", {"digits": 3, "names": ["a", "b"]}),
        (
            "the adapter's own beside them",
            "VFR-1",
            {"digits": 3, "nous.format": "plain", "nous.credit": "step"},
        ),
        ("an empty choice", "VFR-1", {"nous.split": ""}),
        ("settings of a taskset", "VFR-6", {"count": 3, "nous.max_turns": 1024}),
        ("settings within others", "VFR-6", {"task.bonus": 0.5, "task.shelf.unit": "kg", "count": 3}),
    ]
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("an unknown key of the adapter", "VFR-1", {"nous.formt": "chat"}),
        ("an unknown choice", "VFR-1", {"nous.split": "test"}),
        ("a choice that is no text", "VFR-1", {"nous.credit": True}),
        ("a key of the other interface", "VFR-6", {"nous.format": "chat"}),
        ("no tasks", "VFR-6", {"nous.tasks": 0}),
        ("too many turns", "VFR-6", {"nous.max_turns": 1025}),
        ("the taskset's name", "VFR-6", {"id": "other"}),
        ("a value and settings within it", "VFR-6", {"task": 1, "task.bonus": 2}),
        ("an empty part of a name", "VFR-6", {"task..bonus": 2}),
    ]
    return [
        *(
            case(
                comment,
                rule,
                "valid config",
                interface=INTERFACES[rule],
                config=config,
                settings=_reader(rule)(config)[1],
            )
            for comment, rule, config in valid
        ),
        *(
            case(comment, rule, "invalid config", interface=INTERFACES[rule], config=config, refused=True)
            for comment, rule, config in refused
        ),
    ]


def _reader(rule: str) -> Reader:
    return read_choices if rule == "VFR-1" else read_config
