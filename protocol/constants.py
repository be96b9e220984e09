"""Every number of the protocol that is not a run's own setting, with the reason for it.

`specs/config/protocol.toml` holds the same numbers; a test compares them.
"""

from __future__ import annotations

from typing import Final

# --- versions and domains ------------------------------------------------------------------------

PROTOCOL: Final = 1
"""The `v` of every envelope: raised when the meaning of an existing key changes."""

DOMAIN_ENVELOPE: Final = b"nous/envelope/1\x00"
DOMAIN_TASK: Final = b"nous/task/1\x00"
DOMAIN_DRAW: Final = b"nous/draw/1\x00"
DOMAIN_BEACON: Final = b"nous/beacon/1\x00"
DOMAIN_FILES: Final = b"nous/files/1\x00"
DOMAIN_WEIGHTS: Final = b"nous/weights/1\x00"
"""Prefixes that keep a hash or signature made for one purpose from serving another. The zero byte
ends the text, so that no domain is a prefix of another."""

INVITE_PREFIX: Final = "nous1"
"""First characters of an invite: says what the string is to a person and to a clipboard search."""

# --- encoding ------------------------------------------------------------------------------------

MAX_DEPTH: Final = 8
"""Nesting of maps and arrays. The deepest message we have (a segment in a trajectory in a group)
has 4; twice that leaves room for revisions and keeps every recursive reader's stack tiny."""

MAX_ARRAY: Final = 16_384
"""Elements of one array. Segments of a long tool-use trajectory stay below 10,000."""

MAX_MAP: Final = 65_536
"""Entries of one map: the tensors of a mixture-of-experts model number tens of thousands."""

MAX_VALUES: Final = 65_536
"""Values and map keys of one message. A compressed kilobyte can unfold to eight million empty maps; this
bounds the cost of reading to some 40 ms. A group of 1,024 trajectories has 32,000 values, one of 16
trajectories with 1,000 segments each 64,000."""

MAX_MANIFEST_VALUES: Final = 262_144
"""The same for a run or checkpoint manifest: 65,536 tensors with their names, 4,096 files, and as much
again."""

MAX_INT: Final = (1 << 63) - 1
"""Integers on the wire fit a signed 64-bit word, so that every language has a type for them."""

MAX_TEXT: Final = 4_096
"""Bytes of one text value: names, codes, addresses. Token data are `bin`, never text."""

# --- envelopes -----------------------------------------------------------------------------------

MAX_ENVELOPE: Final = 1_000_000
"""Bytes of one gossiped envelope. py-libp2p drops an RPC above 1 MiB without a word; 1,000,000
leaves 48 KB for the RPC around it."""

MAX_BODY: Final = 8_000_000
"""Bytes of a decompressed body: eight times the envelope, above any honest zstd ratio of token
data (about 2), far below a bomb."""

MAX_MANIFEST: Final = 16_000_000
"""Bytes of a run or checkpoint manifest fetched over a stream: 65,536 tensors with names of 150
bytes and hashes."""

MAX_LIFETIME_MS: Final = 600_000
"""Longest `exp - ts`. Ten minutes is longer than any honest group waits in an outbox and bounds
what a receiver must remember to recognise a replay."""

MAX_SKEW_MS: Final = 30_000
"""How far `ts` may lie in the reader's future. Volunteers' clocks without NTP drift by seconds."""

MAX_WINDOW: Final = 1 << 23
"""Largest zstd window: the 8 MiB that RFC 8878 recommends every decoder to support."""

ZSTD_LEVEL: Final = 3
"""What our writer uses; a reader does not care."""

# --- rollouts ------------------------------------------------------------------------------------

MAX_TRAJECTORIES: Final = 1_024
"""Trajectories of one group: group size times agents."""

MAX_TOKENS: Final = 1_048_576
"""Tokens of one trajectory; above any context length in use."""

MAX_COUNTER: Final = 1 << 32
"""Tasks of one (node, checkpoint); a counter beyond it is nonsense."""

MAX_REFERENCED: Final = 1 << 26
"""Bytes of a rollout group that is published by reference, packed or not: 16 rollouts of 32,768 tokens have
4 to 6 MB, and 64 MiB bound what a trainer holds of one group."""

MAX_COUNTER_GAP: Final = 4_096
"""How far a counter may lie above the smallest unseen one. Groups in flight or given up after a
crash leave holes; a jump beyond this is a chosen task."""

# --- checkpoints ---------------------------------------------------------------------------------

CHUNK: Final = 1 << 20
"""Chunk size of our writer: 1 MiB. Small enough that a bad chunk costs little, large enough that
a stream's round trip does not show."""

MIN_CHUNK: Final = 1 << 14
MAX_CHUNK: Final = 1 << 22
"""Bounds on a manifest's chunk size: a reader holds one chunk in memory for each open request."""

MAX_FILES: Final = 4_096
MAX_PATH: Final = 255
MAX_CHECKPOINT_BYTES: Final = 1 << 42
"""4 TiB: no file count times size may overflow a reader's arithmetic."""

MAX_CHAIN: Final = 64
"""Checkpoints from a full one to the parent of a delta: a joiner fetches the manifest of each."""

MAX_MIRRORS: Final = 16
"""HTTP mirrors of one manifest."""

MAX_HAVE: Final = 65_536
"""Bytes of a have-bitmap: 524,288 chunks, which is more than a manifest of MAX_MANIFEST bytes can name."""

# --- gossip --------------------------------------------------------------------------------------

MAX_REMEMBERED: Final = 262_144
"""Digests kept to recognise replays. Above it new messages are held off as busy rather than old
digests forgotten: 436 messages a second for the whole MAX_LIFETIME_MS."""

MAX_SENDERS: Final = 65_536
"""Keys whose rate is followed at once. Keys cost nothing to make: above it a key that was not heard of
within the last minute is held off as busy."""

MAX_RECEIPTS: Final = 4_096
"""Receipts in one message."""

MAX_INVITE: Final = 2_048
"""Characters of an invite: a run id and a dozen addresses."""

MAX_ADDRESSES: Final = 16
