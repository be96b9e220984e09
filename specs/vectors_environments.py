"""Vectors of chapter 13: versions of environments, and seeds."""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

from vectors_world import case

from nous_node.envs.distributions import normal
from nous_node.envs.environment import EnvironmentInfo, small_seed
from nous_node.envs.registry import material, version_of
from nous_node.envs.single_turn import held_out_seed

REPRODUCIBLE: Final[tuple[Literal["exact", "seeded", "none"], ...]] = ("exact", "seeded", "none")
SCORERS: Final[tuple[Literal["pure", "sandbox", "judge"], ...]] = ("pure", "sandbox", "judge")


def versions() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, str, dict[str, Any], dict[str, str]]] = [
        ("no distribution decides", "sort-digits", "1", {"length": 5}, {}),
        ("one distribution", "reasoning-gym/leg_counting", "1", {}, {"reasoning-gym": "0.1.25"}),
        ("another release", "reasoning-gym/leg_counting", "1", {}, {"reasoning-gym": "0.1.26"}),
        ("another member", "reasoning-gym/n_queens", "1", {}, {"reasoning-gym": "0.1.25"}),
        ("a config", "reasoning-gym/leg_counting", "1", {"max_animals": 3}, {"reasoning-gym": "0.1.25"}),
        ("an own version", "reasoning-gym/leg_counting", "2", {}, {"reasoning-gym": "0.1.25"}),
        (
            "values of every kind, keys in the order of the encoding",
            "coins",
            "1.4",
            {"zz": [1, 2.5, "x", True], "a": False, "weight": -0.5, "text": "é"},
            {"Coins_of.the--World": "2024.1", "numpy": "2.4.6"},
        ),
    ]
    return [_version(*row) for row in rows]


def _version(
    comment: str, name: str, own: str, config: dict[str, Any], releases: dict[str, str]
) -> dict[str, Any]:
    info = EnvironmentInfo(name, own, "exact", "pure", False, 1, 1)
    pinned = {normal(one): release for one, release in releases.items()}
    return case(
        comment,
        "EVM-2",
        "valid",
        id=name,
        own=own,
        config=config,
        distributions=releases,
        material=material(info, config, pinned).hex() if pinned else "",
        version=version_of(info, config, pinned),
    )


def facts() -> list[dict[str, Any]]:
    ids = [
        ("an environment", "coins", "coins", ""),
        ("a member of a family", "cards/whist", "cards", "whist"),
        ("a member with a slash", "cards/whist/long", "cards", "whist/long"),
        ("a member named like its family", "cards/cards", "cards", "cards"),
    ]
    named = [
        case(comment, "EVM-1", "valid", id=name, family=family, member=member)
        for comment, name, family, member in ids
    ]
    kinds = [
        case(
            f"{reproducible}, {scorer}",
            "EVM-3",
            "valid",
            reproducible=reproducible,
            scorer=scorer,
            verifiable=EnvironmentInfo("x", "1", reproducible, scorer, False, 1, 1).verifiable,
        )
        for reproducible in REPRODUCIBLE
        for scorer in SCORERS
    ]
    return [*named, *kinds]


def seeds() -> list[dict[str, Any]]:
    rows = [
        ("zeros", bytes(32)),
        ("ones", b"\xff" * 32),
        ("the last bit is dropped", b"\x01" + bytes(31)),
        ("the first byte is the lowest", b"\x00\x00\x00\x01" + b"\xee" * 28),
        ("a hash", hashlib.sha256(b"seed").digest()),
    ]
    small = [
        case(comment, "EVM-4", "valid", seed=seed.hex(), small=small_seed(seed)) for comment, seed in rows
    ]
    held_out = [
        case(
            f"held-out task {index} of {name}",
            "EVM-9",
            "valid",
            id=name,
            index=index,
            seed=held_out_seed(name, index).hex(),
            small=small_seed(held_out_seed(name, index)),
        )
        for name in ("coins", "cards/whist")
        for index in (0, 1, 256)
    ]
    return [*small, *held_out]
