"""A run: its signed manifest and the invite that leads to it. Spec: `specs/05-discovery.md`.

run_id = SHA-256(manifest bytes). The manifest is the body of a `run` envelope signed by the root key that
it names; whoever knows the run id can check it from any source.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .constants import (
    INVITE_PREFIX,
    MAX_ADDRESSES,
    MAX_BODY,
    MAX_ENVELOPE,
    MAX_INVITE,
    MAX_MANIFEST,
    MAX_MANIFEST_VALUES,
    MAX_REFERENCED,
    MAX_TOKENS,
    PROTOCOL,
)
from .encoding import Value, decode, encode, read, shaped
from .envelope import Envelope, Hash, Kind, Millis, Uint
from .errors import Code, RemoteError

Setting = bool | int | float | str | list[bool | int | float | str]
"""What an environment's config may hold."""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Positive = Annotated[float, Meta(gt=0)]


AGENTS = 16
"""Trajectories of one sample that a rollout has room for at the full length of the context; more fit where
they are shorter."""
TOKEN_BYTES = 32
"""Id, log-prob and advantage take 12 bytes; a segment of one token with its parent 15 at most."""
TRAJECTORY_BYTES = 4_096
"""Keys, reward, and a name and components for people."""
GROUP_BYTES = 65_536
"""What stands beside the trajectories, generously."""


class EnvironmentEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One environment of a run."""

    id: Name
    version: Name
    weight: Annotated[int, Meta(ge=1, le=1_000_000)]
    config: dict[str, Setting] = {}
    advantages: bool = False
    """Whether its trajectories may bring their own per-token advantages."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What a volunteer needs to know before it downloads anything."""

    family: Name
    """transformers `model_type`."""
    parameters: Uint
    bytes: Uint
    """Size of the weight files."""
    vocabulary: Annotated[int, Meta(ge=1)]
    context: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    dtype: Literal["float32", "bfloat16", "float16"]
    """What inference computes in; thresholds are calibrated for it."""


class SamplingRules(msgspec.Struct, frozen=True):
    """How tokens are drawn."""

    mode: Literal["seeded", "free"]
    temperature: Positive
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Sampled tokens of one trajectory."""
    stop: Annotated[list[Uint], Meta(min_length=1, max_length=64)]
    """Token ids that end a trajectory with finish `stop`."""
    logprobs: Literal["f32", "f16"]
    """Wire format of log-probs."""


class Bound(msgspec.Struct, frozen=True):
    """A statistic of honest rollouts: its weighted mean over the trained tokens of a group. [VER-10]"""

    mean: Positive
    """What honest groups show on average, under the engine that differs most."""
    deviation: Positive
    """Standard deviation over honest groups of `Thresholds.tokens` trained tokens."""
    limit: Positive
    """Largest value for a group of `Thresholds.tokens` trained tokens."""

    def at(self, tokens: float, reference: int) -> float:
        """The limit for a mean over `tokens` trained tokens, where `limit` is for `reference` of them: a
        mean over fewer tokens strays further from what is usual, by the root of their number. Tokens count
        by their weight. [VER-10]"""
        return self.mean + (self.limit - self.mean) * math.sqrt(max(1.0, reference / max(1, tokens)))

    def deviations(self, value: float, tokens: float, reference: int) -> float:
        """How many standard deviations `value`, a mean over `tokens` trained tokens, lies above the honest
        mean. [VER-11]"""
        return (value - self.mean) / (self.deviation * math.sqrt(max(1.0, reference / max(1, tokens))))


class Thresholds(msgspec.Struct, frozen=True, omit_defaults=True):
    """What honest rollouts show, with a margin. Spec: `specs/08`."""

    logprobs: Bound
    """Weighted mean of the absolute difference of reported and recomputed log-probs."""
    distances: Bound
    """Weighted mean of the distance d of the uniform from the token's interval."""
    distance_max: Positive
    """Largest d of one token."""
    tokens: Annotated[int, Meta(ge=1)]
    """Trained tokens that the two bounds are for, counted by their weight. [VER-10]"""
    drift_slack: Positive
    """Standard deviations above the honest mean that a peer's groups may lie in the long run. [VER-11]"""
    drift_limit: Positive
    """Largest sum of what lies above that. [VER-11]"""
    stop_probability: Annotated[float, Meta(ge=0, le=1)]
    """Smallest recomputed probability of a sampled stop token. [VER-8]"""
    reward: Annotated[float, Meta(ge=0)]
    """Largest absolute difference of the claimed and the recomputed reward."""
    verifier: Literal["float32", "bfloat16", "float16"]
    """What the verifier computes in."""
    calibrated: Name
    """On what they were calibrated, in words, or `not calibrated`."""
    groups: Uint = 0
    """Honest groups that they were calibrated on; 0: not calibrated."""
    false_refusals: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Upper bound (95 %) on the share of honest groups that they refuse."""
    model: Hash | None = None
    """`checkpoints.weights_hash` of the weights that they were calibrated for."""


class Limits(msgspec.Struct, frozen=True):
    """Rates and sizes of this run."""

    groups_per_second: Positive
    """Sustained rollout groups of one key; bursts of 60 seconds' worth are taken, 4,096 groups at most."""
    inline_bytes: Annotated[int, Meta(ge=1024)]
    """Largest envelope on the rollout topics."""


class RunManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a `run` envelope. Unknown keys are ignored, and are part of the hash."""

    name: Name
    created: Millis
    protocol: Annotated[list[Uint], Meta(min_length=2, max_length=2)]
    """Lowest and highest protocol ordinal of the run."""
    root: Hash
    """Key that signed this manifest."""
    trainers: Annotated[list[Hash], Meta(min_length=1, max_length=64)]
    """Keys that may publish checkpoints and receipts."""
    base: Hash
    """Files hash (`checkpoints.files_hash`) of version 0."""
    model: ModelFacts
    environments: Annotated[list[EnvironmentEntry], Meta(min_length=1, max_length=1024)]
    sampling: SamplingRules
    group: Annotated[int, Meta(ge=2, le=1024)]
    """Samples of one task."""
    staleness: Annotated[int, Meta(ge=0, le=8)]
    """How many versions behind the newest a rollout's checkpoint may be."""
    shards: Annotated[int, Meta(ge=1, le=65_536)]
    """Rollout topics."""
    thresholds: Thresholds
    limits: Limits
    chat: Annotated[str, Meta(max_length=256)] = ""
    """Conversation format of the model, by which environments turn messages into tokens; empty: none."""

    @property
    def weights(self) -> list[int]:
        return [entry.weight for entry in self.environments]

    @property
    def rollout_envelope_limit(self) -> int:
        """Bytes of an envelope on a rollout topic. [ROL-14]"""
        return min(MAX_ENVELOPE, self.limits.inline_bytes)

    @property
    def rollout_body_limit(self) -> int:
        """Bytes of a decompressed rollout: what AGENTS full contexts a sample take, and what an envelope
        can hold. [ROL-14]"""
        return min(MAX_BODY, MAX_BODY // MAX_ENVELOPE * self.rollout_envelope_limit, self._group_limit)

    @property
    def referenced_limit(self) -> int:
        """Bytes of a group by reference, packed or not: what AGENTS full contexts a sample take. [ROL-14]"""
        return min(MAX_REFERENCED, self._group_limit)

    @property
    def _group_limit(self) -> int:
        trajectory = TOKEN_BYTES * self.model.context + TRAJECTORY_BYTES
        return GROUP_BYTES + AGENTS * self.group * trajectory

    def to_bytes(self) -> bytes:
        return encode(self)


def run_id(manifest: bytes) -> bytes:
    """SHA-256 of the manifest's bytes."""
    return hashlib.sha256(manifest).digest()


def open_manifest(envelope: Envelope, expected: bytes) -> RunManifest:
    """The manifest in a `run` envelope, checked against the run id that the caller trusts.

    Raises RemoteError: WRONG_KIND, WRONG_RUN, BAD_SIGNATURE, UNSUPPORTED_VERSION or a decoding code.
    A manifest has no expiry: `ts` and `exp` of its envelope are not checked.
    """
    if envelope.head.kind != Kind.RUN:
        raise RemoteError(Code.WRONG_KIND, f"A run manifest was expected, not a {envelope.head.kind}.")
    body = envelope.content(MAX_MANIFEST)
    if run_id(body) != expected or envelope.head.run != expected:  # [RUN-1]
        raise RemoteError(Code.WRONG_RUN, "The run manifest's hash is not the run id that was asked for.")
    value = decode(body, MAX_MANIFEST, MAX_MANIFEST_VALUES)
    _check_protocol(value)
    manifest = shaped(value, RunManifest)
    _check_consistent(manifest)
    if manifest.root != envelope.head.sender:  # [RUN-2]
        raise RemoteError(Code.WRONG_ROLE, "The run manifest is not signed by the root key that it names.")
    envelope.verify_signature()
    return manifest


def _check_protocol(value: Value) -> None:
    """Before anything else: another protocol may give all other keys another shape. [RUN-3]"""
    match value:
        case {"protocol": [int() as lowest, int() as highest]} if not lowest <= PROTOCOL <= highest:
            raise RemoteError(
                Code.UNSUPPORTED_VERSION,
                f"This run speaks protocol {lowest} to {highest} and this node {PROTOCOL}: update nous-node.",
                measured=PROTOCOL,
                threshold=highest,
            )


def _check_consistent(manifest: RunManifest) -> None:
    """RemoteError(OUT_OF_RANGE) where one setting contradicts another. [RUN-4]"""
    names = [entry.id for entry in manifest.environments]
    if len(set(names)) != len(names):
        raise RemoteError(Code.OUT_OF_RANGE, "The run names an environment twice.")
    if max(manifest.sampling.stop) >= manifest.model.vocabulary:
        raise RemoteError(Code.OUT_OF_RANGE, "A stop token of the run is outside its vocabulary.")
    if manifest.sampling.max_tokens > manifest.model.context:
        raise RemoteError(Code.OUT_OF_RANGE, "The run samples more tokens than its context holds.")


def shard_of(key: bytes, shards: int) -> int:
    """The rollout topic of a node: its key's first 8 bytes, little-endian, modulo the shards."""
    return int.from_bytes(key[:8], "little") % shards


class Topics(msgspec.Struct, frozen=True):
    """Names of a run's gossip topics."""

    run: bytes

    def rollouts(self, shard: int) -> str:
        return f"/nous/1/{self.run.hex()}/rollouts/{shard}"

    @property
    def checkpoints(self) -> str:
        return f"/nous/1/{self.run.hex()}/checkpoints"

    @property
    def receipts(self) -> str:
        return f"/nous/1/{self.run.hex()}/receipts"


ADDRESS_PATTERN = r"^/[!-~]*/p2p/[1-9A-HJ-NP-Za-km-z]+\Z"
"""A multiaddr in printable ASCII that ends in a peer id: it is shown to people before it is dialled. `$`
would take a line break behind it."""

WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
"""Unicode White_Space: `str.split` takes U+001C to U+001F as well."""


class Invite(msgspec.Struct, frozen=True):
    """All that a volunteer needs: which run, and where somebody who has it can be reached."""

    run: Hash
    addresses: Annotated[
        list[Annotated[str, Meta(max_length=256, pattern=ADDRESS_PATTERN)]],
        Meta(min_length=1, max_length=MAX_ADDRESSES),
    ]
    """Multiaddrs that end in `/p2p/<peer id>`."""

    def to_text(self) -> str:
        """`nous1` and the base64url of the canonical map with a 4-byte SHA-256 check behind it."""
        payload = encode(self)
        checked = payload + hashlib.sha256(payload).digest()[:4]
        return INVITE_PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Invite:
        """Reads what a person pasted; RemoteError(INVITE) says what is wrong with it. [INV-1] [INV-4]"""
        text = WHITE_SPACE.sub("", text)  # chats and terminals break long lines
        if not text.startswith(INVITE_PREFIX):
            raise _bad_invite(f"an invite begins with {INVITE_PREFIX!r}")
        if len(text) > MAX_INVITE:
            raise _bad_invite(f"an invite has at most {MAX_INVITE} characters, this has {len(text)}")
        try:
            encoded = text[len(INVITE_PREFIX) :]
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise _bad_invite("it holds characters that no invite has") from error
        if base64.urlsafe_b64encode(data).decode().rstrip("=") != encoded:
            raise _bad_invite("it is not written in the base64url form of an invite")
        payload, check = data[:-4], data[-4:]
        if len(check) < 4 or hashlib.sha256(payload).digest()[:4] != check:
            raise _bad_invite("its check does not fit: part of it is missing or changed")
        try:
            return read(payload, cls, MAX_INVITE)
        except RemoteError as error:
            raise _bad_invite(str(error)) from error


def _bad_invite(why: str) -> RemoteError:
    return RemoteError(Code.INVITE, f"This is no valid invite: {why}. Copy the whole string again.")
