"""What the server refuses of one member, so that it costs no other."""

from __future__ import annotations

import pytest

from apfl.errors import InputError
from apfl.federate.secure import PHASES, Aggregator, enlist
from apfl.federate.secure.aggregator import ANSWERS
from apfl.federate.secure.messages import Message, read, write
from tests.federate.secure.toys import Play, ask, names, new_round, plain_sum

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

LIAR = "site-02"


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def lies(play: Play, phase: str, honest: Message) -> dict[str, Message]:
    """False answers of the liar in a phase, by what the server says of them."""
    own, records = honest.sender, dict(honest.records)
    fewer = {number: records[number] for number in list(records)[1:]}
    match phase:
        case "advertise":
            return {"not signed by its identity": Message(honest.kind, own, flipped(honest.fixed, 0))}
        case "share":
            return {"for others than its neighbours": Message(honest.kind, own, b"", fewer)}
        case "mask":
            return {"did not sign the list against which": Message(honest.kind, own, flipped(honest.fixed, 0))}
        case "confirm":
            return {"did not sign the list of survivors": Message(honest.kind, own, flipped(honest.fixed, 0))}
        case _:
            other_kind = {**records, 0: b"k" + records[0][1:]}
            nobody = {**records, 4: records[0]}
            return {
                "revealed a share that nobody asked for": Message(honest.kind, own, b"", other_kind),
                "'site-02' revealed a share that": Message(honest.kind, own, b"", nobody),
            }


@pytest.mark.parametrize("phase", PHASES)
def test_a_false_answer_is_refused_and_the_true_one_still_counts(phase):
    """Site 4 of 5 never shares keys."""
    play = Play(5)
    for before in PHASES[: PHASES.index(phase)]:
        play.step(before, without=["site-04"] if before == "share" else [])
    honest = ask(play.members[LIAR], phase, play.questions[phase][LIAR], play.vectors[LIAR])
    message = read(honest, ANSWERS[phase], play.round_, play.roster, play.roster.number(LIAR))
    for said, lie in lies(play, phase, message).items():
        with pytest.raises(InputError, match=said):
            play.server.receive(LIAR, write(lie, play.round_))
    for later in PHASES[PHASES.index(phase) :]:
        play.step(later, without=["site-04"] if later == "share" else [])
    everyone = {name: play.vectors[name] for name in play.server.survivors}
    assert set(names(4)) <= everyone.keys()
    assert play.server.total.tolist() == plain_sum(everyone, 16)


@pytest.mark.parametrize("phase", PHASES)
def test_an_answer_in_the_name_of_another_is_refused(phase):
    play = Play(4).until(phase)
    answer = ask(play.members["site-00"], phase, play.questions[phase]["site-00"], play.vectors["site-00"])
    with pytest.raises(InputError, match="of another sender"):
        play.server.receive("site-01", answer)
    with pytest.raises(InputError, match="not on the roster"):
        play.server.receive("stranger", answer)


def test_nothing_is_taken_after_the_end():
    play = Play(4)
    for phase in PHASES:
        play.step(phase)
    with pytest.raises(InputError, match="too late"):
        play.server.receive("site-00", play.answers["unmask"]["site-00"])


def test_a_round_of_another_roster_is_refused():
    one, other = (enlist(names(3))["site-00"] for _ in range(2))
    with pytest.raises(InputError, match="given with roster"):
        Aggregator(one.roster, new_round(other))


def test_the_server_has_a_minimum_too():
    first = enlist(names(4))["site-00"]
    play = Play(4)
    play.server = Aggregator(play.roster, play.round_, minimum=4)
    assert first.minimum == 3
    with pytest.raises(InputError, match="3 of 4 members are left and 4 are needed"):
        play.step("advertise", without=["site-03"])
