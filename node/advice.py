"""What to do about a refusal: one sentence for each code, for `nous-node status`.

The texts speak to the person whose rollouts were refused. A test shows that no code is without one.
"""

from __future__ import annotations

from collections.abc import Mapping

from nous_node.protocol.errors import Code

_OURS = "Update nous-node; if it stays, report it: this release should never send that."
_CLOCK = "Set this machine's clock by NTP (`timedatectl set-ntp true`), then start again."
_SLOW = "Usual now and then; if most groups end so, this machine is slow for the run: allow more --threads."
_ENGINE = "Run `nous-node doctor`: an engine or device here computes other numbers than the run's model does."

ADVICE: Mapping[Code, str] = {
    Code.OVERSIZE: "A group is larger than this run's rules can hold: tell its owner to lower --max-tokens.",
    Code.MALFORMED: _OURS,
    Code.NOT_CANONICAL: _OURS,
    Code.TOO_DEEP: _OURS,
    Code.WRONG_TYPE: _OURS,
    Code.OUT_OF_RANGE: _OURS,
    Code.UNSUPPORTED_VERSION: "Update nous-node: the run and this node speak different protocol versions.",
    Code.UNKNOWN_KIND: "Update the older side: this kind of message is not known to it.",
    Code.WRONG_KIND: _OURS,
    Code.WRONG_RUN: "Join with a new invite of this run; the one used belongs to another.",
    Code.BAD_SIGNATURE: "Run `nous-node doctor`: the identity file may be damaged; restore it from a backup.",
    Code.BAD_COMPRESSION: _OURS,
    Code.EXPIRED: "It arrived too late: check the connection, and the clock of this machine.",
    Code.FUTURE_DATED: _CLOCK,
    Code.LIFETIME: _CLOCK,
    Code.DUPLICATE: "Nothing: it had arrived already, and counts once.",
    Code.SEQUENCE_REUSED: "Run one node a home and a key; two with the same key spoil each other's counters.",
    Code.RATE: "Slow down: the run takes fewer groups a second of one key; start fewer nodes with this key.",
    Code.QUARANTINED: "Wait until the quarantine ends; the refusals before it say what to mend meanwhile.",
    Code.BANNED: "This key can take no part in the run any more; ask its trainer if that seems wrong.",
    Code.UNKNOWN_CHECKPOINT: "Usual right after a new version; if it stays, restart to fetch the newest one.",
    Code.STALE: _SLOW,
    Code.WRONG_ROLE: "Only the run's trainers may send that; use the key that the run's manifest names.",
    Code.WRONG_SHARD: _OURS,
    Code.BUSY: "Nothing: the trainer had more than it could take, and the group is sent again.",
    Code.KEY_TOO_NEW: "Nothing: a new key counts from the next checkpoint on.",
    Code.COUNTER_REUSED: "Run one node a key; if the home was restored from a backup, make a new key.",
    Code.COUNTER_GAP: "Keep the home when moving a node: its outbox counts the tasks that were assigned.",
    Code.WITHHELD: "Earlier tasks of this key never arrived: keep the home, and look for lost connections.",
    Code.WRONG_ENVIRONMENT: _OURS,
    Code.GROUP_SIZE: _OURS,
    Code.TOKEN_RANGE: _OURS,
    Code.SEGMENTS: _OURS,
    Code.LOGPROBS: _OURS,
    Code.ADVANTAGES: "Install the environment's version that the run names; advantages are not allowed here.",
    Code.FINISH: _OURS,
    Code.TOO_LONG: _OURS,
    Code.UNAVAILABLE: (
        "The trainer could not fetch a large group from this node in time: keep the node running until its "
        "groups are answered, and allow more --upload."
    ),
    Code.NOT_FINITE: "Run `nous-node doctor`: the model computed no finite number here; try --device cpu.",
    Code.PROMPT_MISMATCH: "Install exactly the environment version that the run names.",
    Code.REWARD_MISMATCH: "Install exactly the environment version that the run names, and its dependencies.",
    Code.LOGPROB_MISMATCH: _ENGINE,
    Code.SAMPLING_MISMATCH: _ENGINE,
    Code.ENVIRONMENT_FAILED: (
        "Install exactly the environment version that the run names; if groups still end so, tell the run's "
        "owner that its environment fails at the trainer."
    ),
    Code.COPIED: "Run one node a key; sampled tokens that somebody else sent first count for nothing.",
    Code.REPETITION: "Usual for a weak policy in a run whose sampling is free; else run `nous-node doctor`.",
    Code.DRIFT: _ENGINE,
    Code.WRONG_CHECKPOINT: "Restart the node: it seems to sample with an older checkpoint than it names.",
    Code.HASH_MISMATCH: "Nothing: a checkpoint's bytes were wrong and are fetched from another peer.",
    Code.PATH: "Leave this run: its checkpoint names files outside its folder, which no honest trainer does.",
    Code.SIZE_MISMATCH: "Nothing: a checkpoint's bytes were wrong and are fetched from another peer.",
    Code.NOT_FOUND: "Wait: no connected peer has what was asked for yet; it is tried again.",
    Code.EQUIVOCATION: "Ask the run's owner: its trainer signed two different checkpoints of one version.",
    Code.UNKNOWN_DTYPE: "Update nous-node: the checkpoint is stored in a format that it does not know.",
    Code.INVITE: "Copy the whole invite again, or ask for a new one.",
}


def advice(code: str) -> str:
    """The next step for a code as it stood in a receipt; a newer trainer may send one we do not know."""
    try:
        return ADVICE[Code(code)]
    except ValueError:
        return "Update nous-node: this release does not know the code."
