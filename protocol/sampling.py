"""The randomness of sampling: one uniform a token. Spec: `specs/06-tasks-and-sampling.md`.

u_t = (x_t >> 11) * 2^-53, where x_t is the little-endian 64-bit word at byte 8t of the ChaCha20 keystream
(RFC 8439) of the trajectory's 32-byte key, nonce zero, counter zero. Dividing all 64 bits by 2^64 would
round to 1.0 at the upper end, and other languages would round elsewhere; 53 bits are exact in a double.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from .constants import MAX_TOKENS
from .errors import LocalError

KEY_BYTES = 32
WORD = 8
_BLOCK = 64


def keystream(key: bytes, start: int, count: int) -> bytes:
    """Bytes 8*start .. 8*(start+count) of the keystream: one word a token. [SMP-1]"""
    if len(key) != KEY_BYTES:
        raise LocalError(f"A sampler key has {KEY_BYTES} bytes, not {len(key)}.")
    if not 0 <= start <= start + count <= MAX_TOKENS:
        raise LocalError(f"Tokens {start} to {start + count} of a trajectory do not exist.")
    block, offset = divmod(start * WORD, _BLOCK)
    counter_and_nonce = struct.pack("<I", block) + bytes(12)
    stream = Cipher(ChaCha20(key, counter_and_nonce), mode=None).encryptor()
    return stream.update(bytes(offset + count * WORD))[offset:]


def uniforms(key: bytes, start: int, count: int) -> list[float]:
    """u_start .. u_(start+count-1), each in [0, 1). [SMP-2]"""
    words = struct.unpack(f"<{count}Q", keystream(key, start, count))
    return [(word >> 11) * 2.0**-53 for word in words]


def choose(logits: Sequence[float], temperature: float, uniform: float) -> int:
    """The token id drawn by `uniform`: smallest id whose cumulative probability exceeds it. [SMP-3]

    The reference that vectors are made with: softmax of logits/temperature in float64, cumulated in id
    order, scaled by its last value so that rounding never leaves a gap below 1. The trainer's tensor form
    is `nous_node.trainer.sampling.choose`.
    """
    cumulative = _cumulative(logits, temperature)
    bound = uniform * cumulative[-1]
    for token, upper in enumerate(cumulative):
        if upper > bound:
            return token
    raise LocalError("No token has a positive probability: the logits are all -inf.")


def distance(logits: Sequence[float], temperature: float, token: int, uniform: float) -> float:
    """How far `uniform` lies outside `token`'s interval of the cumulative distribution; 0 inside it.

    Compared as `choose` compares, so that the distance of the token that it chooses is exactly 0. [SMP-5]
    """
    cumulative = _cumulative(logits, temperature)
    bound = uniform * cumulative[-1]
    lower = cumulative[token - 1] if token else 0.0
    return max(lower - bound, bound - cumulative[token], 0.0) / cumulative[-1]


def _cumulative(logits: Sequence[float], temperature: float) -> list[float]:
    if temperature <= 0:
        raise LocalError(f"A sampling temperature is positive, not {temperature}.")
    top, total, sums = max(logits), 0.0, []
    for logit in logits:
        total += math.exp((logit - top) / temperature)
        sums.append(total)
    return sums
