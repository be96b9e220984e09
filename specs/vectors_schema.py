"""JSON Schemas of the vector files, from one table: which data a case of each file has."""

from __future__ import annotations

import json
from typing import Any

HEX = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
RUNS = {"type": "array", "items": {"type": "array"}}
BYTES = {"anyOf": [HEX, RUNS], "description": "hex, or [[hex, count], ...]"}
TEXT = {"type": "string"}
INT = {"type": "integer"}
NUMBER = {"type": "number"}
BOOL = {"type": "boolean"}
VALUE = {"description": "a tagged value"}
REFUSED = {"const": True, "description": "to be refused, with any code"}
CODE = {"type": "string", "pattern": "^[a-z-]+$"}
TEXTS = {"type": "array", "items": TEXT}
INTS = {"type": "array", "items": INT}
NUMBERS = {"type": "array", "items": NUMBER}
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
FIGURE = {"anyOf": [NUMBER, {"const": None}], "description": "null: no number"}

FIELDS: dict[str, dict[str, Any]] = {
    "versions": {
        "id": TEXT,
        "own": TEXT,
        "config": OBJECT,
        "distributions": OBJECT,
        "material": HEX,
        "version": TEXT,
    },
    "facts": {
        "id?": TEXT,
        "family?": TEXT,
        "member?": TEXT,
        "reproducible?": TEXT,
        "scorer?": TEXT,
        "verifiable?": BOOL,
    },
    "handouts": {
        "group": INT,
        "players": INT,
        "max_tokens": INT,
        "context": INT,
        "asks": OBJECTS,
        "trajectories?": HEX,
        "refused?": REFUSED,
    },
    "seeds": {"seed": HEX, "small": INT, "id?": TEXT, "index?": INT},
    "encoding": {"bytes": BYTES, "value?": VALUE, "limit?": INT, "code?": CODE},
    "identities": {"seed": HEX, "key": HEX, "peer_id": TEXT},
    "signatures": {"key": HEX, "message": HEX, "signature": HEX, "code?": CODE},
    "envelopes": {
        "envelope": HEX,
        "now": INT,
        "head?": VALUE,
        "signed?": HEX,
        "preimage?": HEX,
        "sig?": HEX,
        "id?": HEX,
        "content_sha256?": HEX,
        "code?": CODE,
    },
    "streams": {"message": TEXT, "frame": HEX, "value?": VALUE, "code?": CODE},
    "bitmaps": {"chunks": INT, "have": HEX, "held?": INTS, "code?": CODE},
    "blobs": {"hash": HEX, "request": HEX, "reply": HEX, "data?": HEX, "code?": CODE},
    "introductions": {
        "remote": TEXT,
        "peer?": TEXT,
        "dialled?": BOOL,
        "addresses": TEXTS,
        "asker?": TEXT,
        "result": TEXTS,
    },
    "shards": {"key": HEX, "shards": INT, "shard": INT},
    "gossip": {
        "known": OBJECTS,
        "quarantined": OBJECTS,
        "banned": TEXTS,
        "throttled": TEXTS,
        "steps": OBJECTS,
    },
    "runs": {
        "run": HEX,
        "envelope": HEX,
        "manifest?": HEX,
        "value?": VALUE,
        "topics?": OBJECT,
        "code?": CODE,
    },
    "invites": {"text": TEXT, "run?": HEX, "addresses?": TEXTS, "code?": CODE},
    "tasks": {
        "run": HEX,
        "checkpoint": HEX,
        "beacon": HEX,
        "key": HEX,
        "counter": INT,
        "weights": INTS,
        "samples": INT,
        "seed": HEX,
        "stream": HEX,
        "environment": INT,
        "task_seed": HEX,
        "sampler_keys": TEXTS,
    },
    "uniforms": {"key": HEX, "start": INT, "count": INT, "keystream": HEX, "uniforms": NUMBERS},
    "choices": {"logits": VALUE, "temperature": NUMBER, "uniform": NUMBER, "token": INT},
    "distances": {
        "logits": VALUE,
        "temperature": NUMBER,
        "uniform": NUMBER,
        "token": INT,
        "distance": NUMBER,
        "tolerance": NUMBER,
    },
    "holes": {
        "environments": INTS,
        "steps": OBJECTS,
        "accepted": INT,
        "credit": INT,
        "debit": INT,
        "code?": CODE,
        "measured?": INT,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "arrays": {"form": TEXT, "planes": HEX, "values?": NUMBERS, "code?": CODE},
    "rollouts": {"body": HEX, "value?": VALUE, "code?": CODE},
    "references": {"body": HEX, "value?": VALUE, "frame?": HEX, "group?": HEX, "code?": CODE},
    "limits": {
        "mean": NUMBER,
        "limit": NUMBER,
        "reference": INT,
        "tokens": NUMBER,
        "at": NUMBER,
        "tolerance": NUMBER,
    },
    "verification": {
        "trajectories": OBJECTS,
        "mad?": NUMBER,
        "distance?": NUMBER,
        "largest?": NUMBER,
        "code?": CODE,
        "measured?": FIGURE,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "copies": {
        "groups": OBJECTS,
        "mode?": TEXT,
        "code?": CODE,
        "measured?": NUMBER,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "repetition": {
        "tokens": INTS,
        "stop": INTS,
        "code?": CODE,
        "measured?": NUMBER,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "ends": {
        "tokens": INTS,
        "recomputed": {"type": "array", "items": FIGURE},
        "stop": INTS,
        "stop_probability": NUMBER,
        "code?": CODE,
        "measured?": FIGURE,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "drift": {
        "groups": OBJECTS,
        "code?": CODE,
        "measured?": NUMBER,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "evidence": {
        "groups": OBJECTS,
        "code?": CODE,
        "measured?": NUMBER,
        "threshold?": NUMBER,
        "tolerance": NUMBER,
    },
    "checkpoints": {
        "envelope": HEX,
        "manifest?": HEX,
        "value?": VALUE,
        "hash?": HEX,
        "files_hash?": HEX,
        "weights_hash?": HEX,
        "contents?": TEXTS,
        "code?": CODE,
    },
    "chunks": {"data": BYTES, "hash": HEX, "code?": CODE},
    "trees": {"data": BYTES, "entry": HEX, "code?": CODE},
    "chains": {"manifest": HEX, "chain": TEXTS, "code?": CODE},
    "equivocations": {"proof": HEX, "key?": HEX, "version?": INT, "code?": CODE},
    "deltas": {
        "parent": BYTES,
        "delta?": BYTES,
        "tensors": OBJECT,
        "result?": BYTES,
        "contents?": TEXTS,
        "made?": BOOL,
        "code?": CODE,
    },
    "receipts": {"envelope": BYTES, "body?": HEX, "code?": CODE},
    "proofs": {
        "file": HEX,
        "key?": HEX,
        "run?": HEX,
        "name?": TEXT,
        "made?": INT,
        "standing?": {},
        "messages?": INT,
        "accepted?": INT,
        "refused?": OBJECT,
        "code?": CODE,
    },
    "states": {"steps": OBJECTS, "tolerance": NUMBER},
    "hellos": {"body": HEX, "code?": CODE},
    "nous-default": {"text": TEXT, "tokens": INTS, "logits": NUMBERS, "tolerance": NUMBER, "weights": HEX},
    "chat": {
        "template": TEXT,
        "controls": TEXTS,
        "special": TEXTS,
        "created": INT,
        "messages?": OBJECTS,
        "tools?": OBJECTS,
        "last?": INT,
        "pieces?": {"type": "array", "items": {"type": "array"}},
        "refused?": REFUSED,
        "tokens?": INTS,
        "message?": OBJECT,
    },
    "sort-digits": {
        "seed?": HEX,
        "level?": INT,
        "length?": INT,
        "prompt?": TEXT,
        "tokens?": INTS,
        "solution?": TEXT,
        "answer?": TEXT,
        "ended?": BOOL,
        "reward?": NUMBER,
        "text?": TEXT,
    },
    "atropos": {"lines": OBJECTS, "groups": OBJECTS, "worths?": OBJECTS, "refused?": REFUSED},
    "openenv": {
        "schema?": OBJECT,
        "named?": TEXT,
        "field?": TEXT,
        "text?": {"anyOf": [TEXT, BOOL]},
        "answer?": TEXT,
        "action?": {"anyOf": [OBJECT, {"const": None}], "description": "null: none"},
        "observation?": OBJECT,
        "shown?": TEXTS,
        "config?": OBJECT,
        "refused?": REFUSED,
    },
    "packages": {
        "seed?": HEX,
        "rows?": INT,
        "row?": INT,
        "start?": INT,
        "interface?": TEXT,
        "config?": OBJECT,
        "settings?": OBJECT,
        "refused?": REFUSED,
    },
    "textarena": {
        "player?": INT,
        "told?": {"type": "array", "items": {"type": "array"}},
        "heard?": TEXT,
        "first?": BOOL,
        "text?": TEXT,
        "said?": TEXT,
        "ended?": BOOL,
        "move?": TEXT,
        "given?": {"description": "of any type"},
        "invalid?": BOOL,
        "turns?": INT,
        "unfinished?": BOOL,
        "reward?": NUMBER,
        "components?": OBJECT,
        "game?": TEXT,
        "config?": OBJECT,
        "settings?": OBJECT,
        "refused?": REFUSED,
    },
    "gymnasium": {
        "game?": TEXT,
        "place?": TEXT,
        "said?": TEXT,
        "action?": {"anyOf": [INT, {"const": None}], "description": "null: none"},
        "rewards?": {"type": "array", "items": NUMBERS},
        "advantages?": {"type": "array", "items": NUMBERS},
    },
    "reasoning-gym": {
        "config?": OBJECT,
        "chat?": BOOL,
        "question?": TEXT,
        "text?": TEXT,
        "place?": TEXT,
        "said?": TEXT,
        "formula?": BOOL,
        "answer?": {"anyOf": [TEXT, {"const": None}], "description": "null: none"},
        "id?": TEXT,
        "index?": INT,
        "seed?": HEX,
    },
}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema of an object with exactly these keys; `?` marks optional ones."""
    return {
        "type": "object",
        "properties": {name.rstrip("?"): kind for name, kind in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
        "additionalProperties": False,
    }


def rendered(name: str, comment: str) -> str:
    case = _object({"comment": TEXT, "flags": TEXTS, "requires": TEXTS, **FIELDS[name]})
    cases = {"type": "array", "items": case}
    head = {"comment": TEXT, "schema": TEXT, "run": HEX, "manifest": HEX, "seeds": OBJECT, "cases": cases}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": comment, **_object(head)}
    return json.dumps(schema, indent=1) + "\n"
