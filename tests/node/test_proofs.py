"""Portable proofs: exported from a home, checked anywhere, and worth nothing once a byte is changed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.node import proof_file
from nous_node.node.cli_exit import Exit, verdict
from nous_node.node.home import Home
from nous_node.node.outbox import Outbox
from nous_node.node.proof_file import DOMAIN, ProofError, open_proofs, pack
from nous_node.node.proofs import export_proofs, verify_proofs
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import LocalError, NousError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, Receipts, Standing
from nous_node.protocol.runs import Invite

ME = Identity.from_seed(b"m" * 32)
OTHER = Identity.from_seed(b"o" * 32)
NOW = 1_800_000_000_000
LIMIT = 1 << 20


def receipt(number: int, code: str = "", peer: Identity = ME) -> Receipt:
    figures = (None, None) if not code else (0.5, 1e-4)
    return Receipt(
        bytes([number]) * 32, peer.key, "refused" if code else "accepted", code, *figures, 0 if code else 40
    )


def standing(peer: Identity = ME, credit: int = 400) -> Standing:
    return Standing(peer.key, "active", 10, 2, credit, 15, 3, 12, 0)


def message(
    run: RunFolder,
    root: Identity,
    items: Sequence[Receipt],
    standings: Sequence[Standing] = (),
    seq: int = 1,
    kind: Kind = Kind.RECEIPTS,
) -> bytes:
    body = Receipts(list(items), list(standings)).to_bytes()
    return seal(root, kind, run.run, body, seq=seq, ts=NOW + seq)


@pytest.fixture
def messages(base_run: RunFolder, root: Identity) -> list[bytes]:
    """Three groups accepted, one of them said twice; two refused; others' receipts between."""
    return [
        message(base_run, root, [receipt(1), receipt(9, peer=OTHER), receipt(2, "logprob-mismatch")], seq=1),
        message(base_run, root, [receipt(1), receipt(3), receipt(4), receipt(5, "stale")], seq=2),
    ]


@pytest.fixture
def said(base_run: RunFolder, root: Identity) -> bytes:
    return message(base_run, root, [], [standing(OTHER), standing()], seq=9)


@pytest.fixture
def file(base_run: RunFolder, messages: list[bytes], said: bytes) -> bytes:
    return pack(ME, base_run.envelope, said, messages, NOW + 60_000)


def resigned(data: bytes, who: Identity = ME, **changes: Any) -> bytes:
    """The file as somebody with a key would make it from this one."""
    outer: Any = decode(data, LIMIT)
    inner: Any = decode(outer["signed"], LIMIT)
    signed = encode({**inner, **changes})
    return encode({"sig": who.sign(DOMAIN + signed), "signed": signed})


def test_a_file_says_what_trainers_signed_about_its_key(
    file: bytes, base_run: RunFolder, root: Identity
) -> None:
    proof = open_proofs(file)
    assert (proof.run, proof.name, proof.key, proof.peer_id) == (
        base_run.run.hex(),
        "run",
        ME.key.hex(),
        ME.peer_id,
    )
    assert (proof.messages, proof.accepted) == (2, 3)
    assert proof.refused == {"logprob-mismatch": 1, "stale": 1}
    assert (proof.first, proof.last) == ((NOW + 1) / 1000, (NOW + 2) / 1000)
    word = proof.statement
    assert word is not None
    assert (word.trainer, word.at) == (root.key.hex(), (NOW + 9) / 1000)
    assert (word.state, word.accepted, word.refused, word.credit, word.debit) == ("active", 10, 2, 400, 15)
    assert (word.rank, word.of) == (3, 12)


def test_messages_that_do_not_hold_or_name_others_are_left_out(
    base_run: RunFolder, root: Identity, messages: list[bytes]
) -> None:
    others = message(base_run, root, [receipt(7, peer=OTHER)], seq=4)
    forged = message(base_run, OTHER, [receipt(8)], seq=5)
    proof = open_proofs(pack(ME, base_run.envelope, None, [*messages, others, forged, b"noise"], NOW))
    assert (proof.messages, proof.accepted, proof.statement) == (2, 3, None)


def test_the_newest_messages_are_taken_where_not_all_fit(
    base_run: RunFolder, messages: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_file, "MAX_MESSAGES", 1)
    proof = open_proofs(pack(ME, base_run.envelope, None, messages, NOW))
    assert proof.first == (NOW + 2) / 1000


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.data())
def test_every_changed_byte_is_noticed(whole: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProofError):
        open_proofs(bytes(changed))


@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_every_cut_or_grown_file_is_noticed(whole: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(whole) - 1))
    for other in (whole[:end], whole + whole[end : end + 9], whole[end:]):
        if other != whole:
            with pytest.raises(ProofError):
                open_proofs(other)


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.binary(max_size=400))
def test_no_bytes_crash_the_check(data: bytes) -> None:
    with pytest.raises(ProofError):
        open_proofs(data)


@settings(max_examples=100, deadline=None, database=None)
@given(data=st.data())
def test_the_keys_owner_cannot_change_what_trainers_signed(whole: bytes, data: st.DataObject) -> None:
    """With a good outer signature over changed envelopes: what is printed stays, or the file is refused."""
    inner: Any = decode(decode(whole, LIMIT)["signed"], LIMIT)  # type: ignore[index,call-overload]
    part = data.draw(st.sampled_from(["run", "standing", "receipts"]))
    target = bytearray(inner["receipts"][0] if part == "receipts" else inner[part])
    target[data.draw(st.integers(0, len(target) - 1))] ^= data.draw(st.integers(1, 255))
    changed = [bytes(target), *inner["receipts"][1:]] if part == "receipts" else bytes(target)
    with pytest.raises(ProofError):
        open_proofs(resigned(whole, **{part: changed}))


@pytest.fixture(scope="module")
def whole(base_run: RunFolder, root: Identity) -> bytes:
    items = [receipt(1), receipt(2, "stale")]
    said = message(base_run, root, [], [standing()], seq=9)
    return pack(ME, base_run.envelope, said, [message(base_run, root, items)], NOW)


def test_a_file_about_somebody_elses_key_is_refused(whole: bytes) -> None:
    with pytest.raises(ProofError, match="not made by the key"):
        open_proofs(resigned(whole, OTHER))
    with pytest.raises(ProofError, match=r"standing does not hold .*0 standings of the key"):
        open_proofs(resigned(whole, OTHER, key=OTHER.key))
    with pytest.raises(ProofError, match=r"receipts message 1 does not hold .*no receipt for the key"):
        open_proofs(resigned(whole, OTHER, key=OTHER.key, standing=None))


def test_messages_of_others_than_trainers_are_refused(
    whole: bytes, base_run: RunFolder, root: Identity
) -> None:
    with pytest.raises(ProofError, match=r"standing does not hold .*may not issue"):
        open_proofs(resigned(whole, standing=message(base_run, ME, [], [standing(credit=10**9)])))
    with pytest.raises(ProofError, match=r"receipts message 1 does not hold .*may not issue"):
        open_proofs(resigned(whole, receipts=[message(base_run, ME, [receipt(1)])]))
    other_kind = message(base_run, root, [receipt(1)], kind=Kind.ROLLOUT)
    with pytest.raises(ProofError, match="not a rollout"):
        open_proofs(resigned(whole, receipts=[other_kind]))


def test_messages_of_another_run_are_refused(whole: bytes, root: Identity) -> None:
    body = Receipts([receipt(1)]).to_bytes()
    elsewhere = seal(root, Kind.RECEIPTS, b"x" * 32, body, seq=1, ts=NOW)
    with pytest.raises(ProofError, match="another run"):
        open_proofs(resigned(whole, receipts=[elsewhere]))


def test_another_manifest_under_the_run_id_is_refused(whole: bytes, base_run: RunFolder) -> None:
    envelope = unseal(base_run.envelope, LIMIT)
    forged = seal(ME, Kind.RUN, base_run.run, envelope.content() + b"", seq=0, ts=NOW)
    with pytest.raises(ProofError, match="run manifest does not hold"):
        open_proofs(resigned(whole, run=forged))


def test_a_message_counts_once(whole: bytes, base_run: RunFolder, root: Identity) -> None:
    once = message(base_run, root, [receipt(1)])
    with pytest.raises(ProofError, match="twice"):
        open_proofs(resigned(whole, receipts=[once, once]))


def test_a_small_file_of_large_messages_takes_the_memory_of_one_of_them(
    whole: bytes, base_run: RunFolder, root: Identity
) -> None:
    items = [receipt(1), *[receipt(2, "stale", peer=OTHER)] * 600]
    file = resigned(whole, receipts=[message(base_run, root, items, seq=number) for number in range(1, 41)])
    tracemalloc.start()
    try:
        assert open_proofs(file).messages == 40
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("changes", [{"v": 2}, {"extra": 1}, {"made": -1}, {"receipts": [b""] * 513}])
def test_other_shapes_are_refused(changes: dict[str, Any], whole: bytes) -> None:
    with pytest.raises(ProofError):
        open_proofs(resigned(whole, **changes))


@pytest.fixture
def home(tmp_path: Path, base_run: RunFolder, messages: list[bytes], said: bytes) -> Path:
    path = tmp_path / "home"
    home = Home.open(path)
    home.replace_identity(ME)
    folder = home.joined / base_run.run.hex()[:16]
    folder.mkdir(parents=True)
    (folder / "run.envelope").write_bytes(base_run.envelope)
    with Outbox.open(folder / "outbox.sqlite") as outbox:
        for number, data in enumerate(messages):
            group = seal(ME, Kind.ROLLOUT, base_run.run, b"body", seq=number, ts=NOW)
            rollout = outbox.put(group, checkpoint=bytes(32), version=0, counter=number)
            outbox.acknowledge([Receipt(rollout, ME.key, "accepted", "", None, None, 40)], data)
        outbox.note_standing(standing(), NOW + 9, said)
    return path


def test_an_exported_file_is_verified_without_the_home(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "proof"
    told = export_proofs(file, None, home, as_json=False)
    assert "2 signed messages" in told
    home.rename(tmp_path / "gone")
    text = verify_proofs(file, as_json=False)
    for wanted in (
        ME.peer_id,
        "active, rank 3 of 12",
        "10 groups, 2 refused",
        "400 trained tokens, 15 of them taken off: 385",
        "3 accepted, 2 refused (logprob-mismatch 1, stale 1), in 2 signed messages",
        "2027-01-15 08:00:00 UTC",
        "cannot prove",
        "compare the run id",
    ):
        assert wanted in text
    assert json.loads(verify_proofs(file, as_json=True))["statement"]["rank"] == 3


def test_a_proof_is_held_against_the_run_that_is_meant(
    home: Path, tmp_path: Path, base_run: RunFolder
) -> None:
    file = tmp_path / "proof"
    export_proofs(file, None, home, as_json=False)
    invite = Invite(base_run.run, ["/ip4/192.0.2.1/tcp/4001/p2p/" + ME.peer_id]).to_text()
    for meant in (base_run.run.hex(), invite, str(base_run.path / "run.envelope")):
        text = verify_proofs(file, meant, as_json=False)
        assert "the run is the one that was given" in text
        assert "compare the run id" not in text
    with pytest.raises(ProofError, match="is of another run: run"):
        verify_proofs(file, "0" * 64, as_json=False)
    for wrong in ("0" * 63, str(file), "nous1x"):
        with pytest.raises(NousError, match="invite"):
            verify_proofs(file, wrong, as_json=False)


def test_a_proof_is_replaced_by_a_newer_one_and_nothing_else_is(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "proof"
    for _ in range(2):
        assert json.loads(export_proofs(file, "run", home, as_json=True))["file"] == str(file)
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(LocalError, match="was not replaced"):
        export_proofs(tmp_path / "thesis", None, home, as_json=False)


def test_a_run_is_named_by_name_or_id(home: Path, tmp_path: Path, base_run: RunFolder) -> None:
    export_proofs(tmp_path / "proof", base_run.run.hex()[:8], home, as_json=False)
    for named in ("another", "ru", base_run.run.hex()[:2]):
        with pytest.raises(LocalError, match="No run here is called"):
            export_proofs(tmp_path / "proof", named, home, as_json=False)
    with pytest.raises(LocalError, match="takes part in no run"):
        export_proofs(tmp_path / "proof", None, tmp_path / "empty", as_json=False)


def test_another_identity_is_told_that_nothing_is_signed_about_it(home: Path, tmp_path: Path) -> None:
    Home.open(home).replace_identity(Identity.from_seed(b"n" * 32))
    with pytest.raises(LocalError, match=r"signed nothing about .*identity import"):
        export_proofs(tmp_path / "proof", None, home, as_json=False)
    assert not (tmp_path / "proof").exists()


def test_a_place_that_cannot_be_written_is_told(home: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be written"):
        export_proofs(tmp_path / "none" / "proof", None, home, as_json=False)


def test_what_is_no_proof_is_told_with_its_name_and_a_bad_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "letter"
    file.write_text("dear all")
    with pytest.raises(ProofError, match=r"letter proves nothing: it is no file") as error:
        verify_proofs(file, as_json=False)
    assert verdict(error.value)[0] is Exit.INPUT
    with pytest.raises(LocalError, match="cannot be read"):
        verify_proofs(tmp_path / "none", as_json=False)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("proof_file", "proofs"):
        monkeypatch.setattr(f"nous_node.node.{module}.MAX_FILE", 1000)
    (tmp_path / "big").write_bytes(bytes(2000))
    with pytest.raises(ProofError, match="1001 bytes"):
        verify_proofs(tmp_path / "big", as_json=False)
