"""Writes specs/vectors/*.json, schemas, specs/cddl and the ops of chapter 14; `--check` compares and fails.

PYTHONPATH=tests/links .venv/bin/python specs/make_vectors.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_cddl
import make_ops
import vectors_atropos
import vectors_chat
import vectors_checkpoints
import vectors_content
import vectors_conversations
import vectors_deltas
import vectors_encoding
import vectors_envelopes
import vectors_environments
import vectors_equivocations
import vectors_forward
import vectors_gossip
import vectors_greetings
import vectors_handouts
import vectors_introductions
import vectors_local
import vectors_model
import vectors_openenv
import vectors_packages
import vectors_peers
import vectors_proofs
import vectors_questions
import vectors_receipts
import vectors_references
import vectors_replays
import vectors_rollouts
import vectors_runs
import vectors_schema
import vectors_states
import vectors_swarm
import vectors_tasks
import vectors_textarena
import vectors_verification
from vectors_world import MANIFEST, RUN, SEEDS

FOLDER = Path(__file__).parent / "vectors"

FILES: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "encoding": ("Canonical msgpack: chapter 01.", vectors_encoding.encoding),
    "identities": ("Seeds, keys and peer ids: chapter 02.", vectors_encoding.identities),
    "signatures": ("Ed25519 as it is used here: chapter 02.", vectors_encoding.signatures),
    "envelopes": ("Envelopes with all intermediate values: chapter 02.", vectors_envelopes.envelopes),
    "streams": ("Frames of the stream protocols: chapter 03.", vectors_swarm.streams),
    "bitmaps": ("Which chunks a have-bitmap names: chapter 03.", vectors_swarm.bitmaps),
    "blobs": ("Streams of /nous/blob/1 for one chunk: chapter 03.", vectors_swarm.blobs),
    "introductions": (
        "Addresses of peers that are passed on or believed: chapter 03.",
        vectors_introductions.introductions,
    ),
    "display": (
        "Texts of strangers, and what of them is not shown as it is: chapter 00.",
        vectors_local.display,
    ),
    "announcements": ("Records of a run on the local network: chapter 05.", vectors_local.announcements),
    "turns": ("Which uniforms the turns of a trajectory take: chapter 06.", vectors_local.turns),
    "shards": ("Which rollout topic a key belongs to: chapter 04.", vectors_runs.shards),
    "gossip": ("Verdicts on messages in their order: chapter 04.", vectors_gossip.gossip),
    "runs": ("Run manifests: chapter 05.", vectors_runs.runs),
    "invites": ("Invites: chapter 05.", vectors_runs.invites),
    "tasks": ("Task seeds and what is drawn from them: chapter 06.", vectors_tasks.tasks),
    "uniforms": ("Keystreams and uniforms: chapter 06.", vectors_tasks.streams),
    "choices": ("Tokens chosen on given logits (null: minus infinity): chapter 06.", vectors_tasks.choices),
    "distances": ("How far a uniform lies from a token's interval: chapter 06.", vectors_tasks.distances),
    "holes": ("Tasks of a key and checkpoint that never came: chapter 06.", vectors_peers.holes),
    "arrays": ("Numbers in byte planes: chapter 07.", vectors_rollouts.arrays),
    "rollouts": ("Bodies of rollout groups: chapter 07.", vectors_rollouts.groups),
    "references": (
        "References to rollout groups, and the frames fetched for them: chapter 07.",
        vectors_references.references,
    ),
    "limits": ("Limits by number of tokens: chapter 08.", vectors_verification.limits),
    "verification": (
        "Verdicts on given log-probs and distances (null: no number): chapter 08.",
        vectors_verification.verification,
    ),
    "replays": ("Groups of sort-digits that are played again: chapter 08.", vectors_replays.replays),
    "copies": ("Sampled tokens that came before: chapter 08.", vectors_content.copies),
    "repetition": ("Sampled tokens that only repeat themselves: chapter 08.", vectors_content.repetition),
    "ends": ("How likely a stop token was (null: no number): chapter 08.", vectors_content.ends),
    "drift": ("Sums over the groups of one key: chapter 08.", vectors_peers.drift),
    "evidence": (
        "The version before the named one, over groups of one key: chapter 08.",
        vectors_peers.evidence,
    ),
    "checkpoints": ("Checkpoint manifests: chapter 09.", vectors_checkpoints.checkpoints),
    "chunks": ("Chunks and their hashes: chapter 09.", vectors_checkpoints.chunks),
    "trees": ("Files and their chunks: chapter 09.", vectors_checkpoints.trees),
    "chains": ("Manifests of a chain: chapter 09.", vectors_checkpoints.chains),
    "equivocations": (
        "Proofs of two checkpoints of one version: chapter 09.",
        vectors_equivocations.equivocations,
    ),
    "deltas": ("Deltas between safetensors files: chapter 09.", vectors_deltas.deltas),
    "receipts": ("Receipts: chapter 10.", vectors_receipts.receipts),
    "proofs": ("Proof files: chapter 10.", vectors_proofs.proofs),
    "states": ("What verdicts and time make of a key: chapter 10.", vectors_states.states),
    "greetings": ("What trainers answer to the hellos of a key: chapter 10.", vectors_greetings.greetings),
    "hellos": ("Hellos: chapter 10.", vectors_receipts.hellos),
    "versions": ("Versions of environments: chapter 13.", vectors_environments.versions),
    "facts": ("Ids of environments, and what may be in a run: chapter 13.", vectors_environments.facts),
    "handouts": (
        "What is asked of a policy and what comes back (trajectories: msgpack): chapter 13.",
        vectors_handouts.handouts,
    ),
    "seeds": ("Small seeds and held-out seeds: chapter 13.", vectors_environments.seeds),
    "nous-default": ("Logits of the embedded default model.", vectors_model.model),
    "forward": ("Logits of small models that come with their weights.", vectors_forward.models),
    "chat": ("Conversations in tokens, refused templates, answers: envs/chat.", vectors_chat.chat),
    "conversations": (
        "Whole conversations: which trajectory a question goes on with, and their numbers: envs/chat.",
        vectors_conversations.conversations,
    ),
    "sort-digits": ("Tasks and rewards of the environment sort-digits.", vectors_tasks.sort_digits),
    "atropos": (
        "Scored groups of Atropos environments as rewards and advantages.",
        vectors_atropos.atropos,
    ),
    "openenv": ("Answers and observations of OpenEnv servers.", vectors_openenv.openenv),
    "packages": ("Rows and random streams of packages of environments.", vectors_packages.packages),
    "reasoning-gym": (
        "Prompts, answers and held-out seeds of environments of one question.",
        vectors_questions.questions,
    ),
    "gymnasium": ("Actions in replies, and advantages by turn.", vectors_questions.games),
    "textarena": (
        "What players of textarena are told, what they mean and earn, and settings.",
        vectors_textarena.textarena,
    ),
}


def rendered(name: str) -> str:
    comment, cases = FILES[name]
    head = {
        "comment": comment,
        "schema": f"schema/{name}.json",
        "run": RUN.hex(),
        "manifest": MANIFEST.to_bytes().hex(),
        "seeds": {who: seed.hex() for who, seed in SEEDS.items()},
    }
    lines = ",\n".join(json.dumps(one, ensure_ascii=True) for one in cases())
    return json.dumps(head, indent=1)[:-2] + ',\n "cases": [\n' + lines + "\n ]\n}\n"


def texts() -> dict[Path, str]:
    """What every file should hold."""
    made = {FOLDER / f"{name}.json": rendered(name) for name in FILES}
    for name, (comment, _) in FILES.items():
        made[FOLDER / "schema" / f"{name}.json"] = vectors_schema.rendered(name, comment)
    return made | make_cddl.texts() | make_ops.texts()


def main(check: bool) -> int:
    made = texts()
    stale = 0
    for path, text in made.items():
        before = path.read_text() if path.exists() else ""
        if text == before:
            continue
        stale += 1
        if check:
            print(f"{path}: {_difference(before, text)}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    extra = sorted(set(FOLDER.rglob("*.json")) - set(made))
    for path in extra:
        print(f"{path}: no generator makes this file; delete it")
    if check and (stale or extra):
        print("These files are out of date: run `make vectors` and look at what changed.")
        return 1
    return 0


def _difference(before: str, after: str) -> str:
    """How many lines differ, and the beginning of the first of them."""
    old, new = before.splitlines(), after.splitlines()
    gone, come = set(old) - set(new), set(new) - set(old)
    first = next((line for line in new if line in come), next(iter(gone), "order of lines"))
    return f"{len(gone)} lines of the file are not made any more, {len(come)} are new; first: {first[:200]}"


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
