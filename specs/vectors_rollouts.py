"""Vectors of chapter 07: byte planes, rollout groups, and what a group may not look like."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
from vectors_encoding import tagged
from vectors_world import MANIFEST, STOP, case, group, trajectory

from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.rollouts import Role, Segment, pack_floats, pack_tokens

replace = msgspec.structs.replace


HALVES = [sign * 2.0**-24 * number for sign in (1, -1) for number in (0, 1, 2, 1023, 1024, 1025, 2047, 2048)]
HALVES += [65504.0, 65472.0, -65504.0, 32768.0, 32752.0, 1.0, 1.0 + 2.0**-10, 1.0 - 2.0**-11]
"""Where the exponent of a half changes, or ends."""


def arrays() -> list[dict[str, Any]]:
    tokens = [[], [0], [258], [1, 2, 3, 4], [0x01020304, 0xFFFFFFFF, 0, 65_536]]
    floats = [[], [0.0], [-0.5, -1.25], [-math.log(2.0)], [-1e-30, -100.0, -0.0]]
    good = [
        case("tokens", "ROL-10", "valid", form="u32", values=list(values), planes=pack_tokens(values).hex())
        for values in tokens
    ]
    for form, code in (("f32", "f"), ("f16", "e")):
        for values in (*floats, HALVES):
            exact = list(
                struct.unpack(f"<{len(values)}{code}", struct.pack(f"<{len(values)}{code}", *values))
            )
            good.append(
                case(
                    "floats"
                    if values is not HALVES
                    else "zeros, the smallest, largest and next to them of 16 bits",
                    "ROL-10",
                    "valid",
                    form=form,
                    values=exact,
                    planes=pack_floats(values, form).hex(),
                )
            )
    bad = [
        case(
            "no multiple of the width", "ROL-10", "invalid", form=form, planes="00" * count, code="wrong-type"
        )
        for form, count in (("u32", 3), ("u32", 5), ("f32", 1), ("f16", 3))
    ]
    return good + bad


def groups() -> list[dict[str, Any]]:
    prompt, sampled = Segment(3, Role.RAW, False), Segment(3, Role.ASSISTANT, True)
    full = trajectory(
        tokens=pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]),
        segments=[Segment(1, Role.USER, False), Segment(8, Role.ASSISTANT, True)],
        logprobs=pack_floats([-0.25] * 8),
        finish="length",
    )
    context = trajectory(
        tokens=pack_tokens([1] * 64),
        segments=[Segment(62, Role.USER, False), Segment(2, Role.ASSISTANT, True)],
        logprobs=pack_floats([-1.0, -2.0]),
        finish="length",
    )
    turns = trajectory(
        tokens=pack_tokens([7, 1, STOP, 2, 3, STOP]),
        segments=[Segment(1, Role.USER, False), sampled_of(2), Segment(1, Role.TOOL, False), sampled_of(2)],
        logprobs=pack_floats([-1.0] * 4),
        parents=[-1, 0, 1, 1],
    )
    answers = trajectory(
        tokens=pack_tokens([7, 8, 1, STOP, 2, 3, STOP, 9, 4]),
        segments=[
            Segment(2, Role.USER, False),
            sampled_of(2),
            sampled_of(3),
            Segment(1, Role.TOOL, False),
            sampled_of(1),
        ],
        logprobs=pack_floats([-1.0] * 6),
        parents=[-1, 0, 0, 1, 3],
        finish="cut",
    )
    roots = trajectory(
        tokens=pack_tokens([7, 1, STOP, 8, 2, STOP]),
        segments=[Segment(1, Role.USER, False), sampled_of(2), Segment(1, Role.USER, False), sampled_of(2)],
        logprobs=pack_floats([-1.0] * 4),
        parents=[-1, 0, -1, 2],
    )  # fmt: skip
    own = trajectory(advantages=pack_floats([0.5, -0.5, 1.0]))
    one, none = trajectory(advantage=-0.5, reward=-1.0), trajectory(advantage=0.0)
    largest, least = trajectory(reward=1e6, advantage=1e6), trajectory(reward=-1e6, advantage=-1e6)
    most = trajectory(advantages=pack_floats([1e6, -1e6, 0.0]))
    short = trajectory(tokens=pack_tokens([53, 50, 61, 50, 53, 54]), finish="cut")
    told = trajectory(
        tokens=pack_tokens([7, 1, STOP, 2]),
        segments=[Segment(1, Role.USER, False), sampled_of(2), Segment(1, Role.TOOL, False)],
        logprobs=pack_floats([-1.0] * 2),
        finish="cut",
    )
    whole = trajectory(reward=1, components={"correct": 1, "length": 0.25})
    good = [
        ("a group", "ROL-1 ROL-3 ROL-5 ROL-8", group()),
        ("more trajectories than samples: several agents", "ROL-1", group(trajectories=[trajectory(agent=name) for name in "abc"])),
        ("finish length: the limit of sampled tokens", "ROL-8", group(trajectories=[full, full])),
        ("finish length: the context is full", "ROL-8 ROL-4", group(trajectories=[context, context])),
        ("two turns, each ended by a stop token; a tree of segments", "ROL-8 ROL-9", group(trajectories=[turns, turns])),
        ("two answers to one prompt, one of which is gone on from", "ROL-9", group(trajectories=[answers, answers])),
        ("two roots", "ROL-9", group(trajectories=[roots, roots])),
        ("parents of a chain: well-formed, but what no environment makes", "ROL-9", group(trajectories=[trajectory(parents=[-1, 0])] * 2)),
        ("advantages where the run allows them", "ROL-7", group(env="own-advantages", trajectories=[own, own])),
        ("one advantage for a trajectory, and one that is not trained on", "ROL-7", group(env="own-advantages", trajectories=[one, none])),
        ("all three kinds of advantages in one group", "ROL-7", group(env="own-advantages", trajectories=[one, own, trajectory()])),
        ("the largest rewards and advantages", "ROL-7 ROL-11", group(env="own-advantages", trajectories=[largest, least, most])),
        ("finish cut: a turn that its environment asked no more of", "ROL-8", group(trajectories=[short, short])),
        ("finish cut: the environment has the last word", "ROL-8", group(trajectories=[told, told])),
        ("whole numbers as integers where floats stand", "ENC-12", group(trajectories=[whole, whole])),
        ("the largest counter", "TSK-5", group(counter=(1 << 32) - 1)),
        ("a role of raw text that was sampled", "ROL-3", group(trajectories=[trajectory(segments=[prompt, replace(sampled, role=Role.RAW)])] * 2)),
    ]  # fmt: skip
    return [
        case(comment, rule, "valid", body=one.to_bytes().hex(), value=tagged(decode(one.to_bytes(), 1 << 20)))
        for comment, rule, one in good
    ] + [*_bad_structure(), *_bad_shapes()]


def sampled_of(length: int) -> Segment:
    return Segment(length, Role.ASSISTANT, True)


def _bad_structure() -> list[dict[str, Any]]:
    raw = Segment(3, Role.RAW, False)
    long = MANIFEST.sampling.max_tokens + 1
    nan, infinite = float("nan"), float("inf")
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        ("a token outside the vocabulary", "ROL-2", {"tokens": pack_tokens([1, 2, 259, 4, 5, STOP])}, "token-range"),
        ("the largest u32", "ROL-2", {"tokens": pack_tokens([1, 2, 0xFFFFFFFF, 4, 5, STOP])}, "token-range"),
        ("segments a token short", "ROL-3", {"segments": [raw, sampled_of(2)]}, "segments"),
        ("segments a token long", "ROL-3", {"segments": [raw, sampled_of(4)]}, "segments"),
        ("no tokens", "ROL-3", {"tokens": b""}, "segments"),
        ("a first token that was sampled", "ROL-3", {"segments": [sampled_of(6)], "logprobs": pack_floats([-1.0] * 6)}, "segments"),
        ("more tokens than the context", "ROL-4", {"tokens": pack_tokens([1] * 65), "segments": [Segment(62, Role.RAW, False), sampled_of(3)]}, "too-long"),
        ("more sampled tokens than the run allows", "ROL-4", {"tokens": pack_tokens([1] * (long + 1)), "segments": [Segment(1, Role.RAW, False), sampled_of(long)], "logprobs": pack_floats([-1.0] * long), "finish": "length"}, "too-long"),
        ("tokens of five bytes", "ROL-10", {"tokens": pack_tokens([1, 2, 3, 4, 5, STOP]) + b"\0"}, "wrong-type"),
        ("a log-prob too few", "ROL-5", {"logprobs": pack_floats([-1.0] * 2)}, "logprobs"),
        ("a log-prob for every token", "ROL-5", {"logprobs": pack_floats([-1.0] * 6)}, "logprobs"),
        ("no log-probs", "ROL-5", {"logprobs": b""}, "logprobs"),
        ("log-probs in f16 in a run of f32", "ROL-5", {"logprobs": pack_floats([-1.0] * 3, "f16")}, "logprobs"),
        ("a positive log-prob", "ROL-6", {"logprobs": pack_floats([-1.0, 1e-7, -1.0])}, "logprobs"),
        ("a log-prob of NaN", "ROL-6", {"logprobs": pack_floats([-1.0, nan, -1.0])}, "not-finite"),
        ("a log-prob of minus infinity", "ROL-6", {"logprobs": pack_floats([-1.0, -infinite, -1.0])}, "not-finite"),
        ("advantages where the run takes none", "ROL-7", {"advantages": pack_floats([1.0] * 3)}, "advantages"),
        ("stop without a stop token", "ROL-8", {"tokens": pack_tokens([1, 2, 3, 4, 5, 6])}, "finish"),
        ("stop with a stop token that was not sampled", "ROL-8", {"tokens": pack_tokens([1, 2, STOP, 4, 5, STOP]), "segments": [Segment(1, Role.USER, False), sampled_of(2), Segment(3, Role.USER, False)], "logprobs": pack_floats([-1.0] * 2)}, "finish"),
        ("length with a stop token", "ROL-8", {"finish": "length"}, "finish"),
        ("length before the limit", "ROL-8", {"finish": "length", "tokens": pack_tokens([1, 2, 3, 4, 5, 6])}, "finish"),
        ("sampled tokens go on behind a stop token", "ROL-8", {"tokens": pack_tokens([1, 2, 3, STOP, 5, STOP])}, "finish"),
        ("cut with a sampled stop token at the end", "ROL-8", {"finish": "cut"}, "finish"),
        ("cut at the limit of sampled tokens", "ROL-8", {"tokens": pack_tokens([1] * 9), "segments": [Segment(1, Role.RAW, False), sampled_of(8)], "logprobs": pack_floats([-1.0] * 8), "finish": "cut"}, "finish"),
        ("cut at the end of the context", "ROL-8", {"tokens": pack_tokens([1] * 64), "segments": [Segment(62, Role.RAW, False), sampled_of(2)], "logprobs": pack_floats([-1.0] * 2), "finish": "cut"}, "finish"),
        ("cut without a sampled token", "ROL-8", {"segments": [Segment(6, Role.RAW, False)], "logprobs": b"", "finish": "cut"}, "finish"),
        ("one advantage where the run takes none", "ROL-7", {"advantage": 1.0}, "advantages"),
        ("an advantage of 0 where the run takes none", "ROL-7", {"advantage": 0.0}, "advantages"),
        ("parents of other number than segments", "ROL-9", {"parents": [-1]}, "segments"),
        ("a segment that is its own parent", "ROL-9", {"parents": [-1, 1]}, "segments"),
        ("a parent that comes later", "ROL-9", {"parents": [1, -1]}, "segments"),
        ("two segments that are each other's parents", "ROL-9", {"tokens": pack_tokens([1, 2, 3, 4, 5, STOP]), "segments": [Segment(1, Role.USER, False), Segment(1, Role.USER, False), Segment(1, Role.USER, False), sampled_of(3)], "parents": [-1, 2, 1, 0]}, "segments"),
        ("a trained segment as a root", "ROL-9", {"parents": [-1, -1]}, "segments"),
        ("branches that are together longer than the context", "ROL-4 ROL-9", {"tokens": pack_tokens([1] * 65), "segments": [Segment(33, Role.RAW, False), Segment(29, Role.RAW, False), sampled_of(3)], "parents": [-1, 0, 0]}, "too-long"),
        ("more parents than segments", "ROL-9", {"parents": [-1, 0, 0]}, "segments"),
        ("no parents", "ROL-9", {"parents": []}, "segments"),
        ("a parent of -2", "ROL-9", {"parents": [-2, 0]}, "segments"),
        ("a reward out of range", "ROL-11", {"reward": 1.1e6}, "out-of-range"),
        ("a negative reward out of range", "ROL-11", {"reward": -1.1e6}, "out-of-range"),
    ]  # fmt: skip
    wrong = [
        (comment, rule, group(trajectories=[trajectory(), trajectory(**changes)]), code)
        for comment, rule, changes, code in rows
    ]
    each = pack_floats([1.0, 1.0, 1.0])
    own: list[tuple[str, dict[str, Any], str]] = [
        ("an advantage too few", {"advantages": pack_floats([1.0] * 2)}, "advantages"),
        ("an advantage of NaN", {"advantages": pack_floats([1.0, nan, 1.0])}, "not-finite"),
        ("an advantage of infinity", {"advantages": pack_floats([1.0, infinite, 1.0])}, "not-finite"),
        ("an advantage out of range", {"advantages": pack_floats([1.0, -1.1e6, 1.0])}, "out-of-range"),
        ("one for the trajectory and one a token", {"advantages": each, "advantage": 1.0}, "advantages"),
        ("one for the trajectory out of range", {"advantage": -1.1e6}, "out-of-range"),
    ]
    wrong += [
        (
            comment,
            "ROL-7",
            group(env="own-advantages", trajectories=[trajectory(), trajectory(**data)]),
            code,
        )
        for comment, data, code in own
    ]
    wrong += [
        ("a trajectory too few", "ROL-1", group(trajectories=[trajectory()]), "group-size"),
        ("an environment that the run does not have", "ROL-12", group(env="chess"), "wrong-environment"),
    ]  # fmt: skip
    return [
        case(comment, rule, "invalid structure", body=one.to_bytes().hex(), code=code)
        for comment, rule, one, code in wrong
    ]


def _bad_shapes() -> list[dict[str, Any]]:
    body = decode(group().to_bytes(), 1 << 20)
    assert isinstance(body, dict)
    first = body["trajectories"][0]  # type: ignore[index,call-overload]

    def changed(**changes: Any) -> bytes:
        return encode({key: value for key, value in {**body, **changes}.items() if value is not None})  # type: ignore[dict-item]

    def inner(**changes: Any) -> bytes:
        one = {key: value for key, value in {**first, **changes}.items() if value is not None}  # type: ignore[dict-item]
        return changed(trajectories=[one, first])

    rows = [
        ("no checkpoint", "ROL-13", changed(checkpoint=None)),
        ("a checkpoint hash of 31 bytes", "ROL-13", changed(checkpoint=bytes(31))),
        ("a negative counter", "TSK-5", changed(counter=-1)),
        ("a counter of 2^32", "TSK-5", changed(counter=1 << 32)),
        ("a counter as a float", "ENC-12", changed(counter=0.0)),
        ("a counter as a bool", "ENC-12", changed(counter=False)),
        ("an empty environment id", "ROL-13", changed(env="")),
        ("no engine", "ROL-13", changed(engine=None)),
        ("no trajectory", "ROL-1", changed(trajectories=[])),
        ("tokens as an array", "ROL-13", inner(tokens=[1, 2, 3])),
        ("tokens as text", "ROL-13", inner(tokens="sort 21=")),
        ("no segment", "ROL-3", inner(segments=[])),
        ("a segment of length 0", "ROL-3", inner(segments=[[0, 4, False], [6, 2, True]])),
        ("a segment of negative length", "ROL-3", inner(segments=[[-1, 4, False], [7, 2, True]])),
        ("a segment whose length is true", "ENC-12", inner(segments=[[True, 4, False], [5, 2, True]])),
        ("a mask as a number", "ENC-12", inner(segments=[[3, 4, 0], [3, 2, 1]])),
        ("an unknown role", "ROL-13", inner(segments=[[3, 5, False], [3, 2, True]])),
        ("a segment of two elements", "ROL-13", inner(segments=[[3, 4], [3, 2]])),
        ("a reward as text", "ROL-13", inner(reward="1")),
        ("a reward as a bool", "ENC-12", inner(reward=True)),
        ("no reward", "ROL-13", inner(reward=None)),
        ("parents as bytes", "ROL-13", inner(parents=bytes([0, 1]))),
        ("a parent as a float", "ENC-12", inner(parents=[-1, 0.0])),
        ("an unknown finish", "ROL-13", inner(finish="tired")),
        ("an advantage as text", "ROL-13", inner(advantage="1")),
        ("an advantage as a bool", "ENC-12", inner(advantage=True)),
        *(
            ("nil for an optional key", "ENC-12", changed(trajectories=[{**first, key: None}, first]))  # type: ignore[dict-item]
            for key in ("components", "agent", "advantages", "advantage", "parents")
        ),
        ("65 components", "ROL-13", inner(components={str(number): 0.5 for number in range(65)})),
    ]
    return [
        case(comment, rule, "invalid shape", body=data.hex(), code="wrong-type")
        for comment, rule, data in rows
    ]
