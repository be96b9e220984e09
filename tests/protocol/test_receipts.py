"""Receipts and hellos."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.constants import MAX_BODY, MAX_RECEIPTS
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import Hello, Receipt, Receipts, accepted, open_receipts, refused
from nous_node.protocol.rollouts import Engine

ID, PEER = bytes([1]) * 32, bytes([2]) * 32


def test_a_refusal_carries_code_and_figures(world: Any) -> None:
    error = RemoteError(Code.STALE, "The rollout is old.", measured=5, threshold=2)
    receipts = Receipts([accepted(ID, PEER, 7), refused(ID, PEER, error)])
    opened = open_receipts(
        world.opened(Kind.RECEIPTS, receipts.to_bytes(), world.trainer), world.run, world.manifest
    )
    assert opened.items[0] == Receipt(ID, PEER, "accepted", "", None, None, 7)
    assert opened.items[1] == Receipt(ID, PEER, "refused", "stale", 5.0, 2.0, 0)


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), -float("inf")])
def test_a_figure_that_is_no_number_leaves_the_receipt_sendable(measured: float) -> None:
    error = RemoteError(Code.LOGPROB_MISMATCH, "The model is broken.", measured=measured, threshold=1e-4)
    receipt = refused(ID, PEER, error)
    assert (receipt.measured, receipt.threshold) == (None, 1e-4)
    Receipts([receipt]).to_bytes()


@pytest.mark.parametrize("code", Code)
def test_every_code_can_be_sent(code: Code) -> None:
    receipts = Receipts([refused(ID, PEER, RemoteError(code, "text"))])
    assert read(receipts.to_bytes(), Receipts, MAX_BODY) == receipts


def test_as_many_receipts_as_allowed_are_one_message(world: Any) -> None:
    receipts = Receipts([accepted(ID, PEER, 1)] * MAX_RECEIPTS)
    envelope = world.opened(Kind.RECEIPTS, receipts.to_bytes(), world.trainer)
    assert open_receipts(envelope, world.run, world.manifest) == receipts
    more = Receipts([accepted(ID, PEER, 1)] * (MAX_RECEIPTS + 1)).to_bytes()
    with pytest.raises(RemoteError):
        open_receipts(world.opened(Kind.RECEIPTS, more, world.trainer), world.run, world.manifest)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(world: Any, body: bytes) -> None:
    with pytest.raises(RemoteError):
        open_receipts(world.opened(Kind.RECEIPTS, body, world.trainer), world.run, world.manifest)
    with pytest.raises(RemoteError):
        read(body, Hello, MAX_BODY)


def test_a_hello_survives() -> None:
    hello = Hello("client/1", Engine("e", "1", "float32", "cpu"))
    assert read(hello.to_bytes(), Hello, MAX_BODY) == hello
