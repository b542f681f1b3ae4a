"""A site obeys what its federation's key signed for it, once, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Terms
from apfl.federate.instructions import COMMON_NAME, FIELDS, N_NODES, Instruction, Recipient, Signer, hashes
from tests.federate.federation_toys import FIXED, NAMES, draw_shard

serialization = pytest.importorskip(
    "cryptography.hazmat.primitives.serialization", reason="needs the flower extra: pip install 'apfl[flower]'"
)

PAYLOADS = {"terms": b"{}", "publication": b"weights"}
ASKED = Instruction("f", "17", "4", "a", "train.refine", hashes(PAYLOADS))


def keys(folder: Path) -> tuple[bytes, bytes]:
    from apfl.federate.flower.keys import signing_key

    return signing_key(folder)


def certified(folder: Path) -> bytes:
    """Make an authority in a server's folder; its certificate."""
    from apfl.federate.flower.keys import make_certificates

    return make_certificates(folder / "keys", ["localhost"]).authority.read_bytes()


@pytest.fixture
def server(tmp_path):
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as coordinator:
        yield coordinator


def signer(server: Coordinator, folder: Path | None = None) -> Signer:
    return Signer(*keys(folder or server.ledger.folder), server.ledger)


def refused(recipient: Recipient, settings: dict[str, str], expected: Instruction = ASKED) -> str:
    with pytest.raises(InputError) as error:
        recipient.accept(settings, expected)
    return str(error.value)


def test_an_instruction_is_obeyed_once_also_after_a_restart(server, tmp_path):
    settings = signer(server).sign(ASKED)
    Recipient(tmp_path / "a", "a", "4").accept(settings, ASKED)
    assert "obeyed already" in refused(Recipient(tmp_path / "a", "a", "4"), settings)
    later = signer(server).sign(ASKED)
    Recipient(tmp_path / "a", "a", "4").accept(later, ASKED)
    assert "obeyed already" in refused(Recipient(tmp_path / "a", "a", "4"), settings)


MUTATIONS = {
    "federation": "g", "run": "18", "node": "5", "kind": "train.statistics",
    "payloads": hashes(PAYLOADS | {"publication": b"forged"}),
}  # fmt: skip


@pytest.mark.parametrize("field", MUTATIONS)
def test_what_was_signed_for_something_else_is_refused(field, server, tmp_path):
    """Signed by the right key, and replayed to another federation, run, node or question, or with other payloads."""
    recipient = Recipient(tmp_path / "a", "a", "4")
    settings = signer(server).sign(replace(ASKED, **{field: MUTATIONS[field]}))
    assert f"another {field.rstrip('s')}" in refused(recipient, settings)
    recipient.accept(signer(server).sign(ASKED), ASKED)


def test_what_was_signed_for_another_site_is_refused(server, tmp_path):
    settings = signer(server).sign(ASKED)
    assert "another site" in refused(Recipient(tmp_path / "b", "b", "4"), settings)


@pytest.mark.parametrize("field", [*asdict(ASKED)])
def test_a_changed_statement_breaks_the_signature(field, server, tmp_path):
    """The attacker changes the statement so that it says what the site expects."""
    settings = signer(server).sign(replace(ASKED, **({field: MUTATIONS[field]} if field in MUTATIONS else {})))
    told = json.loads(settings["instruction"]) | (
        {field: 10**18} if field == "number" else {field: asdict(ASKED)[field]}
    )
    if field == "site":
        told["site"] = ""
    settings["instruction"] = json.dumps(told, sort_keys=True)
    assert "signature" in refused(Recipient(tmp_path / "a", "a", "4"), settings)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "", "00", "rubbish", 7, "[" * 10_000])
def test_what_is_unsigned_or_rubbish_is_refused(field, value, server, tmp_path):
    settings = dict(signer(server).sign(ASKED)) | {field: value}
    authority = certified(tmp_path / "server")
    for recipient in (Recipient(tmp_path / "a", "a", "4"), Recipient(tmp_path / "b", "a", "4", authority)):
        refused(recipient, settings)
        assert not (recipient.folder / "federation.pub").exists()
        assert not (recipient.folder / "instructions.json").exists()


def test_only_the_authority_of_the_site_vouches_for_a_key(server, tmp_path):
    authority = certified(tmp_path / "server")
    recipient = Recipient(tmp_path / "a", "a", "4", authority)
    recipient.accept(signer(server).sign(ASKED), ASKED)
    certified(tmp_path / "other")
    for folder in (tmp_path / "other", tmp_path / "bare"):
        folder.mkdir(exist_ok=True)
        assert "not certified" in refused(recipient, signer(server, folder).sign(ASKED))
    # The server's own certificate is of the same authority, and its key is another.
    server_key = (tmp_path / "server" / "keys" / "server.crt").read_text()
    assert "not one for instructions" in refused(recipient, dict(signer(server).sign(ASKED)) | {"voucher": server_key})
    stolen = signer(server, tmp_path / "bare").sign(ASKED) | {"voucher": keys(tmp_path / "server")[1].decode()}
    assert "signature" in refused(recipient, stolen)


@pytest.mark.parametrize("names", [("another service",), (), (COMMON_NAME, "another service")])
def test_an_ed25519_certificate_for_another_use_does_not_instruct(names, server, tmp_path):
    """The authority may be that of a whole hospital."""
    from cryptography import x509

    from apfl.federate.flower import keys as made

    authority = certified(tmp_path / "server")
    private, _ = keys(tmp_path / "other")
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name) for name in names])
    issuer = made._issuer(made.ServerKeys(tmp_path / "server" / "keys"))
    key = serialization.load_pem_private_key(private, None)
    voucher = made._signed(key, subject, *issuer, [], 10, authority=False)
    recipient = Recipient(tmp_path / "a", "a", "4", authority)
    told = refused(recipient, Signer(private, voucher, server.ledger).sign(ASKED))
    assert told == f"its key was certified for '{', '.join(names)}', not instructions"
    recipient.accept(signer(server).sign(ASKED), ASKED)


def test_without_an_authority_the_first_key_is_kept_and_said(server, tmp_path, caplog):
    recipient = Recipient(tmp_path / "a", "a", "4")
    with caplog.at_level(logging.WARNING):
        recipient.accept(signer(server).sign(ASKED), ASKED)
    assert "on first contact" in caplog.text
    (tmp_path / "other").mkdir()
    assert "saw first" in refused(recipient, signer(server, tmp_path / "other").sign(ASKED))
    caplog.clear()
    recipient.accept(signer(server).sign(ASKED), ASKED)
    assert not caplog.text


def test_a_key_seen_first_stays_the_same_key_once_an_authority_certifies_it(server, tmp_path):
    recipient = Recipient(tmp_path / "a", "a", "4")
    recipient.accept(signer(server).sign(ASKED), ASKED)
    certified(tmp_path / "server")
    assert "CERTIFICATE" in signer(server).voucher
    recipient.accept(signer(server).sign(ASKED), ASKED)


def later(monkeypatch, days: int) -> None:
    """Certificates are issued as if so many days had passed."""
    from datetime import UTC, datetime, timedelta
    from types import SimpleNamespace

    clock = SimpleNamespace(now=lambda zone: datetime.now(UTC) + timedelta(days=days))
    monkeypatch.setattr("apfl.federate.flower.keys.datetime", clock)


def test_a_key_that_was_replaced_does_not_instruct_any_more(server, tmp_path, monkeypatch):
    """Whoever stole the former key could go on, as its certificate is valid for ten years."""
    authority, folder = certified(tmp_path / "server"), tmp_path / "server"
    recipient = Recipient(tmp_path / "a", "a", "4", authority)
    stolen = signer(server)
    recipient.accept(stolen.sign(ASKED), ASKED)
    (folder / "signing.key").unlink()
    later(monkeypatch, 1)
    recipient.accept(stolen.sign(ASKED), ASKED)  # it has not heard of the new one yet
    recipient.accept(signer(server).sign(ASKED), ASKED)
    assert "was replaced by one that is certified later" in refused(recipient, stolen.sign(ASKED))
    recipient.accept(signer(server).sign(ASKED), ASKED)
    (folder / "signing.crt").unlink()  # the same key, certified anew
    later(monkeypatch, 2)
    recipient.accept(signer(server).sign(ASKED), ASKED)
    assert "replaced" in refused(Recipient(tmp_path / "a", "a", "4", authority), stolen.sign(ASKED))


def test_another_authority_begins_anew(server, tmp_path, monkeypatch):
    """A site that was given another ca.crt owes nothing to the keys of the former one."""
    later(monkeypatch, 9)
    recipient = Recipient(tmp_path / "a", "a", "4", certified(tmp_path / "server"))
    recipient.accept(signer(server).sign(ASKED), ASKED)
    monkeypatch.undo()
    other = Recipient(tmp_path / "a", "a", "4", certified(tmp_path / "other"))
    other.accept(signer(server, tmp_path / "other").sign(ASKED), ASKED)


def test_a_site_that_lost_its_folder_obeys_nothing_of_another_run_or_node(server, tmp_path):
    """What it obeyed before is forgotten: only run and node keep what was signed then from counting now."""
    authority = certified(tmp_path / "server")
    former = signer(server).sign(ASKED)
    Recipient(tmp_path / "a", "a", "4", authority).accept(former, ASKED)
    shutil.rmtree(tmp_path / "a")
    recipient = Recipient(tmp_path / "a", "a", "4", authority)
    assert "another run" in refused(recipient, former, replace(ASKED, run="18"))
    assert "another node" in refused(Recipient(tmp_path / "a", "a", "5", authority), former, replace(ASKED, node="5"))
    now = replace(ASKED, run="18")
    recipient.accept(signer(server).sign(now), now)
    assert "obeyed already" in refused(recipient, former)  # its number is below that of any instruction since


def test_nobody_else_changes_whom_a_site_trusts(server, tmp_path):
    """Also if a plain flower-supernode was started without a umask."""
    before = os.umask(0)
    try:
        Recipient(tmp_path / "a", "a", "4").accept(signer(server).sign(ASKED), ASKED)
        certificate = certified(tmp_path / "server")
        Recipient(tmp_path / "a", "a", "4", certificate).accept(signer(server).sign(ASKED), ASKED)
    finally:
        os.umask(before)
    names = {"federation.pub", "federation.crt", "instructions.json", "instructions.lock"}
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()} == dict.fromkeys(
        names, 0o600
    )


@pytest.mark.parametrize("content", ["", "[]", '{"4": "x"}', '{"4": null}'])
def test_a_site_that_cannot_read_its_last_number_obeys_nothing(content, server, tmp_path):
    recipient = Recipient(tmp_path / "a", "a", "4")
    recipient.accept(signer(server).sign(ASKED), ASKED)
    recipient.numbers.write_text(content)
    assert "instructions.json cannot be read" in refused(recipient, signer(server).sign(ASKED))


def test_many_connections_of_a_site_do_not_make_it_forget_the_present_one(server, tmp_path):
    """Without keys every connection is another node."""
    for node in map(str, range(4, 4 + 3 * N_NODES)):
        asked = replace(ASKED, node=node)
        settings = signer(server).sign(asked)
        recipient = Recipient(tmp_path / "a", "a", node)
        recipient.accept(settings, asked)
        assert "obeyed already" in refused(recipient, settings, asked)
    assert len(json.loads(recipient.numbers.read_text())) == N_NODES


def test_numbers_rise_when_the_clock_is_set_back_and_after_a_restored_backup(server, monkeypatch):
    def number() -> int:
        return int(json.loads(signer(server).sign(ASKED)["instruction"])["number"])

    first = number()
    monkeypatch.setattr("apfl.federate.instructions.time.time_ns", lambda: 0)
    assert number() == first + 1
    monkeypatch.undo()
    with server.ledger.transaction():
        server.ledger.put("instruction", "0")
    assert number() > first


def test_the_key_is_private_and_made_once(server, tmp_path):
    before = keys(tmp_path / "server")
    assert (tmp_path / "server" / "signing.key").stat().st_mode & 0o777 == 0o600
    certified(tmp_path / "server")
    (tmp_path / "server" / "keys" / "ca.key").rename(tmp_path / "ca.key")
    with pytest.raises(InputError, match="put it back for one start"):
        keys(tmp_path / "server")
    (tmp_path / "ca.key").rename(tmp_path / "server" / "keys" / "ca.key")
    after = keys(tmp_path / "server")
    assert after[0] == before[0]
    assert b"CERTIFICATE" in after[1]
    assert keys(tmp_path / "server") == after


# --------------------------------------------------------------------------------- through Flower's client app


@pytest.fixture
def site(tmp_path, monkeypatch) -> dict[str, str]:
    """The configuration of a site's node."""
    pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in {"_run_id": 17, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    rows = draw_shard(30, 1)
    np.savez(
        tmp_path / "rows.npz", features=rows.features.numpy(), labels=rows.labels.numpy(), class_names=np.array(NAMES)
    )
    return {"name": "a", "folder": str(tmp_path / "a"), "data": str(tmp_path / "rows.npz")}


def sent(config: dict[str, str], kind: str, settings: dict[str, str], payloads: dict[str, bytes], run: int = 17):
    """What the site answers to a message, however it came: settings and payloads."""
    from flwr.app import Context, Message, RecordDict

    from apfl.federate.flower.client_app import app
    from apfl.federate.flower.wire import content, parts

    context = Context(run_id=run, node_id=4, node_config=config, state=RecordDict(), run_config={})
    message = Message(content(payloads, settings), 4, kind)
    return parts(app(message, context))


@pytest.mark.parametrize("how", ["unsigned", "other key", "other kind", "other run", "repeated"])
def test_a_site_answers_a_forged_question_with_nothing(how, server, site, tmp_path, caplog):
    payloads = {"terms": server.invitation()}
    question = Instruction("f", "17", "4", "a", "query.describe", hashes(payloads))
    kind, run, own = "query.describe", 17, signer(server).sign(question)
    assert "description" in sent(site, kind, own, payloads)[1]
    (tmp_path / "other").mkdir()
    settings = signer(server, tmp_path / "other" if how == "other key" else None).sign(question)
    settings = {"unsigned": {}, "repeated": own}.get(how, settings)
    kind = "train.statistics" if how == "other kind" else kind
    run = 18 if how == "other run" else run
    answer, answered = sent(site, kind, settings, payloads, run)
    assert not answered
    told = {"name": "a", "failed": "this site refused the instruction; its log says why", "hashes": "{}"}
    assert answer == told
    assert "refused an instruction" in caplog.text


def test_the_terms_a_site_agreed_to_name_the_federation_that_may_instruct_it(server, site, tmp_path):
    (tmp_path / "terms.json").write_text(Terms("g", method=FIXED).to_json())
    payloads = {"terms": server.invitation()}
    question = Instruction("f", "17", "4", "a", "evaluate.metrics", hashes(payloads))
    agreed = site | {"terms": str(tmp_path / "terms.json")}
    answer, answered = sent(agreed, question.kind, signer(server).sign(question), payloads)
    assert "refused" in answer["failed"]
    assert not answered
