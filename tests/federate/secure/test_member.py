"""What a member refuses, besides what attackers try: questions out of turn, lists without it, other rosters."""

from __future__ import annotations

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate.secure import Member, Roster, Round, enlist, new_key, verifying_key
from apfl.federate.secure.messages import SERVER, Message, bitmap, read, write
from tests.federate.secure.toys import Play, ask, names, new_round

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")


def refused(call, *given) -> str:
    with pytest.raises(InputError) as error:
        call(*given)
    return str(error.value)


def test_questions_come_in_their_order():
    play = Play(4).until("confirm")
    fresh = enlist(names(4))["site-00"]
    assert "in no round" in refused(fresh.mask, b"", np.arange(5))
    for phase in ("share", "confirm", "unmask"):
        assert "waits for 'advertise'" in refused(getattr(fresh, phase), b"")
    late = play.members["site-00"]
    assert "waits for 'confirm'" in refused(late.unmask, b"")


def test_nothing_follows_the_last_answer():
    play = Play(4)
    for phase in ("advertise", "share", "mask", "confirm", "unmask"):
        play.step(phase)
    for phase, question in play.questions.items():
        again = ask(play.members["site-00"], phase, question["site-00"], play.vectors["site-00"])
        assert again == play.answers[phase]["site-00"]  # the same question, the same answer
    for phase in ("share", "confirm", "unmask"):
        assert "answers it only once" in refused(getattr(play.members["site-00"], phase), b"")


@pytest.mark.parametrize(("field", "value"), [("federation", "another"), ("roster", "0" * 64)])
def test_a_round_is_of_the_federation_and_the_roster_that_the_site_confirmed(field, value):
    member = enlist(names(3))["site-00"]
    told = {each: getattr(new_round(member), each) for each in Round.__dataclass_fields__} | {field: value}
    assert "this site confirmed" in refused(member.advertise, Round(**told).to_bytes())
    assert member.progress.last == 0


def test_an_identity_is_the_one_of_the_roster():
    members = enlist(names(3))
    roster = members["site-00"].roster
    message = refused(lambda: Member("site-00", new_key(), roster, federation="f"))
    assert "another key for 'site-00'" in message
    assert "not on the roster" in refused(lambda: Member("stranger", new_key(), roster, federation="f"))


def test_a_sum_of_fewer_than_two_is_no_sum():
    key = new_key()
    roster = Roster({"a": verifying_key(key), "b": verifying_key(new_key())})
    assert "fewer than 2" in refused(lambda: Member("a", key, roster, federation="f", minimum=1))


def test_keys_of_too_few_neighbours_are_refused():
    play = Play(7).until("share")
    for n_others, enough in ((3, False), (4, True)):  # five of seven with itself
        records = {i: play.server.advertised[i].to_bytes() for i in range(1, 1 + n_others)}
        question = write(Message("advertisements", SERVER, records=records), play.round_)
        if enough:
            assert play.members["site-00"].share(question)
        else:
            assert "keys of 3 neighbours given; 4 are needed" in refused(play.members["site-00"].share, question)


def test_its_own_keys_are_not_a_neighbours():
    play = Play(4).until("share")
    records = {i: each.to_bytes() for i, each in play.server.advertised.items()}
    question = write(Message("advertisements", SERVER, records=records), play.round_)
    assert "not neighbours of this site" in refused(play.members["site-00"].share, question)


def listed(play: Play, kind: str, members: set[int], records: dict[int, bytes]) -> bytes:
    return write(Message(kind, SERVER, bitmap(members, play.roster), records), play.round_)


def test_it_masks_only_with_all_neighbours_on_the_list_and_itself_on_it():
    play = Play(7).until("mask")
    member, vector = play.members["site-00"], play.vectors["site-00"]
    shares = dict(read(play.questions["mask"]["site-00"], "delivery", play.round_, play.roster).records)
    everyone = set(range(7))
    fewer = {i: shares[i] for i in shares if i != 3}
    cases = {
        "not those of all neighbours": [listed(play, "delivery", everyone, fewer)],
        "not on the list of those that share": [listed(play, "delivery", everyone - {0}, shares)],
        "4 of 7 members are left": [listed(play, "delivery", {0, 1, 2, 3}, {i: shares[i] for i in (1, 2, 3)})],
    }
    for message, questions in cases.items():
        for question in questions:
            assert message in refused(member.mask, question, vector)
    assert "6 numbers given; this round is for 5" in refused(
        member.mask, play.questions["mask"]["site-00"], np.arange(6)
    )
    assert member.mask(listed(play, "delivery", everyone - {3}, fewer), vector)


def test_it_masks_with_nobody_whose_keys_it_did_not_see():
    play = Play(7).until("share")
    records = {i: play.server.advertised[i].to_bytes() for i in range(1, 6)}
    play.questions["share"]["site-00"] = write(Message("advertisements", SERVER, records=records), play.round_)
    member = play.members["site-00"]
    member.share(play.questions["share"]["site-00"])
    question = listed(play, "delivery", set(range(7)), {i: bytes(94) for i in range(1, 7)})
    assert "not those of all neighbours" in refused(member.mask, question, play.vectors["site-00"])


def test_it_confirms_only_lists_of_those_that_shared_with_itself_on_them():
    play = Play(7).until("mask")
    member = play.members["site-00"]
    told = read(play.questions["mask"]["site-00"], "delivery", play.round_, play.roster).records
    without_6 = {i: told[i] for i in told if i != 6}
    question = listed(play, "delivery", set(range(6)), without_6)
    member.mask(question, play.vectors["site-00"])
    assert "not on the list of survivors" in refused(member.confirm, listed(play, "survivors", {1, 2, 3, 4, 5}, {}))
    assert "members that shared no keys" in refused(member.confirm, listed(play, "survivors", {0, 1, 2, 3, 6}, {}))
    assert "4 of 7 members are left" in refused(member.confirm, listed(play, "survivors", {0, 1, 2, 3}, {}))
    assert "not those of all neighbours" in refused(
        member.confirm, listed(play, "survivors", {0, 1, 2, 3, 4}, {1: bytes(64)})
    )
    receipts = {i: bytes(64) for i in (1, 2, 3, 4)}
    assert "did not sign that it masked against the same list" in refused(
        member.confirm, listed(play, "survivors", {0, 1, 2, 3, 4}, receipts)
    )


def test_signatures_count_once_from_survivors_and_up_to_the_threshold():
    play = Play(7).until("mask")
    play.step("mask", without=["site-06"])
    play.step("confirm")
    signed, member = dict(play.server.signatures), play.members["site-00"]
    assert sorted(signed) == [0, 1, 2, 3, 4, 5]
    for n, enough in ((4, False), (5, True)):
        records = {i: signed[i] for i in range(n)} | {6: signed[5]}  # and one that did not survive
        question = write(Message("confirmations", SERVER, records=records), play.round_)
        if enough:
            assert member.unmask(question)
        else:
            assert "4 members signed the list of survivors" in refused(member.unmask, question)


def test_a_share_that_cannot_be_opened_costs_its_sender_only():
    play = Play(7).until("mask")
    shares = dict(read(play.questions["mask"]["site-00"], "delivery", play.round_, play.roster).records)
    shares[3] = bytes(len(shares[3]))
    play.questions["mask"]["site-00"] = listed(play, "delivery", set(range(7)), shares)
    for phase in ("mask", "confirm", "unmask"):
        play.step(phase)
    assert sorted(play.server.revealed[0]) == [0, 1, 2, 4, 5, 6]
    assert play.server.total.tolist() == [sum(int(v[i]) for v in play.vectors.values()) % 2**16 for i in range(5)]
