"""A node's identity: one Ed25519 key, which is also its libp2p peer id. Spec: `specs/02`. [IDN-1]

A key on the wire is the 32 raw public bytes. The peer id is their libp2p form: the identity multihash of
the protobuf `PublicKey{Type: Ed25519, Data: key}`, in base58btc (it begins `12D3KooW`).
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .errors import Code, LocalError, RemoteError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""identity multihash, 36 bytes; field 1 (type) = 1 (Ed25519); field 2 (data), 32 bytes."""

SMALL_ORDER = frozenset(
    bytes.fromhex(y) + bytes([last | sign])
    for y, last in (
        ("01" + 30 * "00", 0x00),
        ("ee" + 30 * "ff", 0x7F),
        ("ec" + 30 * "ff", 0x7F),
        (31 * "00", 0x00),
        ("ed" + 30 * "ff", 0x7F),
        ("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc", 0x05),
        ("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03", 0x7A),
    )
    for sign in (0x00, 0x80)
)
"""All encodings of the eight points of small order. A signature under such a key fits many messages, and
libraries differ on which: nodes that judge a message differently would blame each other for forwarding."""

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and what is derived from it. `repr` never shows the secret."""

    private: Ed25519PrivateKey
    key: bytes

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte seed (RFC 8032 private key)."""
        if len(seed) != KEY_BYTES:
            raise LocalError(f"An identity seed has {KEY_BYTES} bytes, not {len(seed)}.")
        private = Ed25519PrivateKey.from_private_bytes(seed)
        return cls(private, private.public_key().public_bytes_raw())

    @classmethod
    def from_pem(cls, pem: bytes) -> Identity:
        """Reads an unencrypted PKCS#8 PEM; raises LocalError with what to do where it is none."""
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise LocalError(
                "The identity file is not an unencrypted PKCS#8 PEM key. Restore it from your backup "
                "with `nous-node identity import FILE`, or move it away to get a new identity."
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise LocalError("The identity file holds a key that is not Ed25519; import an Ed25519 key.")
        return cls(private, private.public_key().public_bytes_raw())

    @property
    def seed(self) -> bytes:
        return self.private.private_bytes_raw()

    @property
    def peer_id(self) -> str:
        return peer_id(self.key)

    def pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(key: bytes, signature: bytes, message: bytes) -> None:
    """Raises RemoteError(BAD_SIGNATURE) unless `signature` over `message` is `key`'s.

    RFC 8032 section 5.1.7 with the cofactorless equation and S < L, as OpenSSL does it. [IDN-2]
    """
    if key in SMALL_ORDER:  # [IDN-3]
        raise RemoteError(Code.BAD_SIGNATURE, "The sender's key is a point of small order.")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise RemoteError(Code.BAD_SIGNATURE, "The signature does not fit the sender's key.") from error


def peer_id(key: bytes) -> str:
    """The libp2p peer id of a raw Ed25519 public key."""
    return _base58(PEER_ID_PREFIX + key)


def key_of(peer: str) -> bytes:
    """The raw public key in a peer id; RemoteError where it is not an Ed25519 one."""
    raw = _unbase58(peer)
    if len(raw) != len(PEER_ID_PREFIX) + KEY_BYTES or not raw.startswith(PEER_ID_PREFIX):
        raise RemoteError(Code.WRONG_TYPE, f"{peer[:64]!r} is not the peer id of an Ed25519 key.")
    return raw[len(PEER_ID_PREFIX) :]


def _base58(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def _unbase58(text: str) -> bytes:
    if len(text) > 128:
        raise RemoteError(Code.WRONG_TYPE, "A peer id has at most 128 characters.")
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise RemoteError(Code.WRONG_TYPE, f"{text[:64]!r} is not base58 text.")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")
