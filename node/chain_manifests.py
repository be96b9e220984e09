"""The manifests of a chain, fetched by their hashes: several side by side, and all of them in bounded time.

They are what a plan is made of; where they cannot be had the files are fetched.
Spec: `specs/09-checkpoints.md` [CKP-14].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from nous_node.protocol.checkpoints import CheckpointManifest, check_link, read_manifest
from nous_node.protocol.constants import MAX_CHUNK
from nous_node.protocol.errors import NousError

from .blobs import FetchError
from .fetch_plan import Target
from .swarm import Swarm

MAX_CHAIN_BYTES = 64_000_000
"""Of the manifests of one chain, which are held in memory: with more the chain is not used."""

CHAIN_SECONDS = 60.0
"""For all of them: a joiner should not wait longer for the way to save time."""

CHAIN_AT_ONCE = 4
"""Manifests that are fetched side by side."""

Add = Callable[[bytes, bytes, CheckpointManifest], None]
"""Puts a manifest with its hash and bytes into its place."""


async def fetch_chain(
    swarm: Swarm, target: Target, digests: Sequence[bytes], add: Add
) -> dict[bytes, CheckpointManifest]:
    """Manifests of the target's chain by their hashes. `add` is called in a thread for each that comes, also
    where others do not: the next try finds it there.

    Raises FetchError where one cannot be had, RemoteError where the chain is none, and what `add` does.
    """
    found: dict[bytes, CheckpointManifest] = {}
    problem: NousError | None = None
    room, left, turn = MAX_CHAIN_BYTES, iter(digests), trio.Lock()

    async def fetch_in_turn() -> None:
        nonlocal problem, room
        for digest in left:
            try:
                data = await swarm.blob(digest, MAX_CHUNK)
                manifest = read_manifest(data, digest)
                check_link(target.manifest, target.manifest.chain.index(digest), manifest)
                room -= len(data)
                if room < 0:
                    raise FetchError("The manifests of the chain are too large.")
                async with turn:
                    await trio.to_thread.run_sync(add, digest, data, manifest)
            except NousError as error:  # raised below: the nursery would wrap it
                problem = error
                nursery.cancel_scope.cancel()
                return
            found[digest] = manifest

    with trio.move_on_after(CHAIN_SECONDS) as limit:
        async with trio.open_nursery() as nursery:
            for _ in range(CHAIN_AT_ONCE):
                nursery.start_soon(fetch_in_turn)
    if problem is not None:
        raise problem
    if limit.cancelled_caught:
        raise FetchError("The manifests of the chain take too long.")
    return found
