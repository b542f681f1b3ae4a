"""Messages are read in one way only; changed ones are refused, or mean what they say and harm nobody."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate.secure import PHASES, Member
from apfl.federate.secure.aggregator import ANSWERS
from apfl.federate.secure.messages import HEAD, SERVER, Message, bitmap, kind_of, members_of, read, write
from tests.federate.secure.toys import Play, ask

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

QUESTIONS = dict(zip(PHASES[1:], ("advertisements", "delivery", "survivors", "confirmations"), strict=True))
N = 150  # changed messages of each kind


@pytest.fixture(scope="module")
def play() -> Play:
    """A round with all its messages, in which one member dropped out."""
    whole = Play(5).until("mask")
    whole.step("mask", without=["site-04"])
    whole.step("confirm")
    whole.step("unmask")
    return whole


def changed(data: bytes, rng: np.random.Generator) -> bytes:
    """A message with one or a few bytes changed, cut off, put in, or repeated; half of the changes hit the head."""
    end = HEAD.size + 8 if rng.random() < 0.5 else len(data)
    at = int(rng.integers(min(end, len(data))))
    match rng.integers(6):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        case 1:
            return data[:at] + rng.bytes(4) + data[at + 4 :]
        case 2:
            return data[:at]
        case 3:
            return data[:at] + rng.bytes(int(rng.integers(1, 40))) + data[at:]
        case 4:
            return data + data[at:]
        case _:
            return data[:at] + data[at + int(rng.integers(1, 100)) :]


def messages_of(play: Play) -> dict[str, tuple[bytes, int]]:
    """One message of each kind with its sender."""
    number = play.roster.number("site-01")
    answers = {kind: (play.answers[phase]["site-01"], number) for phase, kind in ANSWERS.items()}
    questions = {kind: (play.questions[phase]["site-01"], SERVER) for phase, kind in QUESTIONS.items()}
    return answers | questions


@pytest.mark.parametrize("kind", [*ANSWERS.values(), *QUESTIONS.values()])
def test_what_is_read_is_what_would_be_written(kind, play):
    data, sender = messages_of(play)[kind]
    assert write(read(data, kind, play.round_, play.roster, sender), play.round_) == data
    rng, seen = np.random.default_rng(len(kind)), Counter()
    for _ in range(10 * N):
        other = changed(data, rng)
        if other == data:
            continue
        try:
            message = read(other, kind, play.round_, play.roster, sender)
        except InputError:
            seen["refused"] += 1
            continue
        assert write(message, play.round_) == other
        assert len(other) <= len(data) + len(data) * len(play.roster)
        seen["accepted"] += 1
    assert min(seen["refused"], seen["accepted"]) > N / 3, seen  # an altered key or share is a message, too


def reborn(member: Member, state: bytes) -> Member:
    return Member(member.name, member.identity, member.roster, federation=member.federation, state=state)


@pytest.mark.parametrize("phase", QUESTIONS)
def test_changed_questions_are_refused_or_tell_nothing_more(phase, play):
    fresh = Play(5).until(phase)
    member = fresh.members["site-01"]
    question, vector, state = fresh.questions[phase]["site-01"], fresh.vectors["site-01"], member.state
    honest = ask(reborn(member, state), phase, question, vector)
    rng, seen = np.random.default_rng(1), Counter()
    for _ in range(N):
        other = changed(question, rng)
        if other == question:
            continue
        killed = reborn(member, state)
        try:
            answer = ask(killed, phase, other, vector)
        except InputError:
            seen["refused"] += 1
            assert killed.state == state  # nothing is done by halves
            continue
        seen["accepted"] += 1
        # Shares are opened later, and a signature that is wrong does not count: the answer is the honest one.
        assert answer == honest
    print(phase, dict(seen))
    assert seen["refused"] > N / 2
    assert (seen["accepted"] > 0) == (phase in ("mask", "unmask"))


@pytest.mark.parametrize("phase", PHASES)
def test_changed_answers_cost_nobody_else(phase):
    """The server refuses a changed answer and takes the unchanged one after it; the sum is what it should be."""
    fresh = Play(5).until(phase)
    honest = ask(fresh.members["site-01"], phase, fresh.questions[phase]["site-01"], fresh.vectors["site-01"])
    rng, refused = np.random.default_rng(2), 0
    for _ in range(N):
        other = changed(honest[: HEAD.size + 160], rng) + honest[HEAD.size + 160 :]  # all but most of a payload
        if other == honest or kind_is_readable_payload(phase, other, honest):
            continue
        with pytest.raises(InputError):
            fresh.server.receive("site-01", other)
        refused += 1
    assert refused > N / 2
    for later in PHASES[PHASES.index(phase) :]:
        fresh.step(later)
    assert fresh.server.total.tolist() == [sum(int(v[i]) for v in fresh.vectors.values()) % 2**16 for i in range(5)]


def kind_is_readable_payload(phase: str, other: bytes, honest: bytes) -> bool:
    """Shares, masked numbers and revealed shares may be anything: only their size and their owners are fixed."""
    same_head = other[: HEAD.size] == honest[: HEAD.size] and len(other) == len(honest)
    return phase in ("share", "mask", "unmask") and same_head


def test_noise_is_no_message():
    rng = np.random.default_rng(3)
    for size in (0, 1, HEAD.size - 1, HEAD.size, 1000):
        with pytest.raises(InputError):
            kind_of(rng.bytes(size))


def test_messages_of_another_round_sender_or_kind_are_refused(play):
    data, sender = messages_of(play)["confirmation"]
    other = Play(5).round_
    assert other.id != play.round_.id
    with pytest.raises(InputError, match="of another round"):
        read(data, "confirmation", other, play.roster, sender)
    with pytest.raises(InputError, match="of another sender"):
        read(data, "confirmation", play.round_, play.roster, sender + 1)
    with pytest.raises(InputError, match="'confirmation' given; a 'masked' is needed"):
        read(data, "masked", play.round_, play.roster, sender)


def test_a_claim_of_many_records_is_refused_before_anything_is_read(play):
    head = HEAD.pack(b"APMS", 1, 7, play.round_.id, SERVER, 2**32 - 1)
    with pytest.raises(InputError, match="wrong size"):
        read(head, "confirmations", play.round_, play.roster)


@pytest.mark.parametrize("kind", ["advertisement", "masked", "confirmation"])
def test_some_kinds_have_no_records(kind, play):
    data, sender = messages_of(play)[kind]
    claimed = data[: HEAD.size - 4] + (1).to_bytes(4) + data[HEAD.size :]
    for more in range(10):
        with pytest.raises(InputError, match="wrong size"):
            read(claimed + bytes(more), kind, play.round_, play.roster, sender)


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1), (0, 5)])
def test_records_are_of_members_in_their_order(numbers, play):
    records = b"".join(number.to_bytes(4) + bytes(64) for number in numbers)
    data = HEAD.pack(b"APMS", 1, 7, play.round_.id, SERVER, 2) + records
    with pytest.raises(InputError, match="not of members of the roster in their order"):
        read(data, "confirmations", play.round_, play.roster)
    fine = write(Message("confirmations", SERVER, records={0: bytes(64), 1: bytes(64)}), play.round_)
    assert len(fine) == len(data)


def test_a_list_names_members_of_the_roster_only(play):
    assert members_of(bitmap({0, 4}, play.roster), play.roster) == {0, 4}
    with pytest.raises(InputError, match="not on the roster"):
        members_of(bytes([1 << 5]), play.roster)
