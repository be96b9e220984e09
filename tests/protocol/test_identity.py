"""Keys, peer ids and signatures."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import SMALL_ORDER, Identity, key_of, peer_id, verify

# RFC 8032 section 7.1, test 2
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
KEY = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)
ORDER = (1 << 252) + 27742317777372353535851937790883648493


def test_the_vector_of_rfc_8032_holds() -> None:
    identity = Identity.from_seed(SEED)
    assert (identity.key, identity.sign(b"\x72"), identity.seed) == (KEY, SIGNATURE, SEED)
    verify(KEY, SIGNATURE, b"\x72")


def test_a_signature_with_a_large_s_is_refused() -> None:
    scalar = int.from_bytes(SIGNATURE[32:], "little") + ORDER
    with pytest.raises(RemoteError) as caught:
        verify(KEY, SIGNATURE[:32] + scalar.to_bytes(32, "little"), b"\x72")
    assert caught.value.code is Code.BAD_SIGNATURE


@pytest.mark.parametrize("key", sorted(SMALL_ORDER), ids=bytes.hex)
def test_a_key_of_small_order_signs_nothing(key: bytes) -> None:
    with pytest.raises(RemoteError) as caught:
        verify(key, b"\1" + bytes(63), b"any message")
    assert caught.value.code is Code.BAD_SIGNATURE


@pytest.mark.parametrize("signature", [b"", SIGNATURE[:63], SIGNATURE + b"\0", bytes(64)])
def test_other_signatures_are_refused(signature: bytes) -> None:
    with pytest.raises(RemoteError) as caught:
        verify(KEY, signature, b"\x72")
    assert caught.value.code is Code.BAD_SIGNATURE


@pytest.mark.parametrize("key", [b"", KEY[:31], bytes([2]) + bytes(31)])
def test_bytes_that_are_no_key_are_refused(key: bytes) -> None:
    with pytest.raises(RemoteError):
        verify(key, SIGNATURE, b"\x72")


def test_the_peer_id_is_that_of_libp2p() -> None:
    assert Identity.from_seed(bytes(32)).peer_id == "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_gives_back_its_key(key: bytes) -> None:
    assert key_of(peer_id(key)) == key


@given(
    st.text(max_size=140) | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=60)
)
def test_other_text_is_no_peer_id(text: str) -> None:
    try:
        again, code = peer_id(key_of(text)), Code.WRONG_TYPE
    except RemoteError as error:
        again, code = text, error.code
    assert (again, code) == (text, Code.WRONG_TYPE)


def test_a_pem_file_gives_back_its_identity() -> None:
    identity = Identity.from_seed(SEED)
    assert Identity.from_pem(identity.pem()).key == KEY


def pem(private: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\xff",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        pem(ec.generate_private_key(ec.SECP256R1())),
        pem(Ed25519PrivateKey.generate(), b"secret"),
        # an OID that no library knows
        b"-----BEGIN PRIVATE KEY-----\nMA4CAQAwBQYDKmQBBAIEAA==\n-----END PRIVATE KEY-----\n",
    ],
)
def test_a_file_that_is_no_identity_is_a_sentence(data: bytes) -> None:
    with pytest.raises(LocalError, match="key"):
        Identity.from_pem(data)


def test_the_secret_is_not_shown() -> None:
    identity = Identity.from_seed(SEED)
    assert SEED.hex() not in repr(identity)
    assert identity.peer_id in repr(identity)


def test_a_seed_has_32_bytes() -> None:
    with pytest.raises(LocalError, match="32"):
        Identity.from_seed(b"short")
