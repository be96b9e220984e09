"""The errors of the protocol.

    NousError
    ├── LocalError          our side asked for something impossible: a bug or a setting to mend
    └── RemoteError         a peer sent something that may not be sent; `code` goes back in receipts

A RemoteError's text is what an operator reads; its `code` is what a program reads. Codes are assigned in
`specs/assigned.md`, which a test compares with `Code`.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why something was refused. Kebab-case text on the wire: readable in a log of any client."""

    # decoding [ENC-*]
    OVERSIZE = "oversize"
    MALFORMED = "malformed"
    NOT_CANONICAL = "not-canonical"
    TOO_DEEP = "too-deep"
    WRONG_TYPE = "wrong-type"
    OUT_OF_RANGE = "out-of-range"
    # envelopes [ENV-*]
    UNSUPPORTED_VERSION = "unsupported-version"
    UNKNOWN_KIND = "unknown-kind"
    WRONG_KIND = "wrong-kind"
    WRONG_RUN = "wrong-run"
    BAD_SIGNATURE = "bad-signature"
    BAD_COMPRESSION = "bad-compression"
    EXPIRED = "expired"
    FUTURE_DATED = "future-dated"
    LIFETIME = "lifetime"
    # gossip [GOS-*]
    DUPLICATE = "duplicate"
    SEQUENCE_REUSED = "sequence-reused"
    RATE = "rate"
    QUARANTINED = "quarantined"
    BANNED = "banned"
    UNKNOWN_CHECKPOINT = "unknown-checkpoint"
    STALE = "stale"
    WRONG_ROLE = "wrong-role"
    WRONG_SHARD = "wrong-shard"
    BUSY = "busy"
    # assignment [TSK-*]
    KEY_TOO_NEW = "key-too-new"
    COUNTER_REUSED = "counter-reused"
    COUNTER_GAP = "counter-gap"
    WITHHELD = "withheld"
    WRONG_ENVIRONMENT = "wrong-environment"
    # structure [ROL-*]
    GROUP_SIZE = "group-size"
    TOKEN_RANGE = "token-range"
    SEGMENTS = "segments"
    LOGPROBS = "logprobs"
    ADVANTAGES = "advantages"
    FINISH = "finish"
    TOO_LONG = "too-long"
    UNAVAILABLE = "unavailable"
    NOT_FINITE = "not-finite"
    # verification [VER-*]
    PROMPT_MISMATCH = "prompt-mismatch"
    REWARD_MISMATCH = "reward-mismatch"
    LOGPROB_MISMATCH = "logprob-mismatch"
    SAMPLING_MISMATCH = "sampling-mismatch"
    ENVIRONMENT_FAILED = "environment-failed"
    COPIED = "copied"
    REPETITION = "repetition"
    DRIFT = "drift"
    WRONG_CHECKPOINT = "wrong-checkpoint"
    # checkpoints [CKP-*]
    HASH_MISMATCH = "hash-mismatch"
    PATH = "path"
    SIZE_MISMATCH = "size-mismatch"
    NOT_FOUND = "not-found"
    EQUIVOCATION = "equivocation"
    UNKNOWN_DTYPE = "unknown-dtype"
    # invites [INV-*]
    INVITE = "invite"


class NousError(Exception):
    """Any error of ours. The text is one sentence for a person."""


class LocalError(NousError):
    """Something that this side asked for is impossible; nothing was sent."""


class TooLargeError(LocalError):
    """A message is larger than a receiver takes."""


class RemoteError(NousError):
    """Bytes from elsewhere break a rule. They are refused, and nothing of them is used.

    `measured` and `threshold` are set where the rule is a comparison, and travel in the receipt.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        measured: float | None = None,
        threshold: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.measured = measured
        self.threshold = threshold
