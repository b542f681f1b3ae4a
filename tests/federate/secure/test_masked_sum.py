"""The masked sum is the plain one, bit for bit, whoever drops out when, and whoever is killed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.federate.secure import PHASES, Member, bits_for_sum, enlist, masked_sum, signed
from apfl.federate.secure import roster as roster_module
from apfl.federate.secure.ciphers import new_key, public_of
from apfl.federate.secure.keys import Advertisement
from apfl.federate.secure.messages import Message, write
from apfl.federate.secure.ring import threshold
from tests.federate.secure.toys import Play, ask, draw, names, plain_sum

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

BEFORE_THE_SUM = ("advertise", "share", "mask")  # who drops out in these is not in it


@st.composite
def rounds(draw_, phases=PHASES):
    """Members, bits, length, and members that drop out in some phases, as many as the threshold allows."""
    n, bits, length = draw_(st.integers(3, 8)), draw_(st.integers(1, 64)), draw_(st.integers(1, 40))
    dropping = draw_(st.lists(st.sampled_from(names(n)), max_size=n - threshold(n), unique=True))
    return n, bits, length, {name: draw_(st.sampled_from(phases)) for name in dropping}


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_it_is_the_plain_sum_of_the_survivors(told):
    n, bits, length, drop = told
    vectors = draw(names(n), length, bits, seed=length)
    done = masked_sum(vectors, bits, drop=drop)
    survivors = [name for name in names(n) if drop.get(name) not in BEFORE_THE_SUM]
    assert list(done.survivors) == survivors
    assert done.total.tolist() == plain_sum({name: vectors[name] for name in survivors}, bits)


@pytest.mark.parametrize("phase", PHASES)
def test_one_dropout_too_many_in_any_phase_reveals_nothing_and_says_so(phase):
    vectors = draw(names(7), 5, 16)
    enough = dict.fromkeys(names(7)[:2], phase)
    assert masked_sum(vectors, 16, drop=enough).total.tolist()
    with pytest.raises(InputError, match=r"4 .* 5 are needed; .*masked"):
        masked_sum(vectors, 16, drop=enough | {"site-06": phase})


def test_dropouts_in_different_phases_add_up():
    drop = {"site-00": "share", "site-01": "mask", "site-02": "mask"}
    with pytest.raises(InputError, match="4 of 7 members are left and 5 are needed"):
        masked_sum(draw(names(7), 5, 16), 16, drop=drop)


def test_signed_statistics_of_16_bits_come_back():
    vectors = draw(names(5), 100, 16)
    bits = bits_for_sum(16, 5)
    total = signed(masked_sum(vectors, bits).total, bits)
    assert (total == sum(vectors.values())).all()


def test_members_serve_for_many_rounds_with_fresh_keys():
    members = enlist(names(4))
    vectors = draw(names(4), 5, 16)
    totals = [masked_sum(vectors, 16, members=members, number=number).total.tolist() for number in (1, 2, 7)]
    assert totals[0] == totals[1] == totals[2] == plain_sum(vectors, 16)
    plays = [Play(members=members).until("confirm") for _ in range(2)]
    first, second = (play.answers["mask"]["site-00"][-10:] for play in plays)
    assert (plays[0].vectors["site-00"] == plays[1].vectors["site-00"]).all()
    assert first != second


def test_all_that_is_sent_is_overheard_and_counted():
    heard = []
    done = masked_sum(draw(names(4), 5, 16), 16, overhear=lambda *told: heard.append(told))
    assert [phase for phase, _, _ in heard] == [phase for phase in PHASES for _ in range(4)]
    for name in names(4):
        assert done.sent[name] == sum(len(answer) for _, sender, answer in heard if sender == name)
        assert done.received[name] > 0


def test_members_of_the_roster_without_a_vector_count_as_dropped():
    members = enlist(names(4))
    vectors = draw(names(3), 5, 16)
    assert masked_sum(vectors, 16, members=members).total.tolist() == plain_sum(vectors, 16)


# ------------------------------------------------------------------------------------------------ killed members


def reborn(member: Member, state: bytes) -> Member:
    return Member(member.name, member.identity, member.roster, federation=member.federation, state=state)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_member_goes_on_and_answers_the_same(phase, when):
    """Killed before it answers, or after it wrote its state and before the answer was sent."""
    play = Play(5).until(phase)
    member = play.members["site-02"]
    written: list[bytes] = []
    member._keep = written.append
    question, vector = play.questions[phase]["site-02"], play.vectors["site-02"]
    if when == "before":
        play.members["site-02"] = reborn(member, member.state)
    else:
        answer = ask(member, phase, question, vector)
        play.members["site-02"] = reborn(member, written[-1])
        assert ask(play.members["site-02"], phase, question, vector) == answer
    for later in PHASES[PHASES.index(phase) :]:
        play.step(later)
    assert play.server.total.tolist() == plain_sum(play.vectors, 16)


def test_every_member_killed_after_every_step():
    play = Play(4)
    for phase in PHASES:
        play.members = {name: reborn(member, member.state) for name, member in play.members.items()}
        play.step(phase)
    assert play.server.total.tolist() == plain_sum(play.vectors, 16)


def test_the_state_is_written_before_the_answer_is_given():
    play = Play(4)
    for phase in PHASES:
        written: list[bytes] = []
        play.members["site-00"]._keep = written.append
        play.step(phase)
        assert len(written) == 1
        assert phase.encode() in written[0]


def test_a_state_that_cannot_be_written_gives_no_answer_until_it_can():
    full, written = [True], []

    def keep(state: bytes) -> None:
        if full[0]:
            raise OSError("no space left")
        written.append(state)

    play = Play(4).until("unmask")
    member, question = play.members["site-00"], play.questions["unmask"]["site-00"]
    member._keep = keep
    for _ in range(2):
        with pytest.raises(OSError, match="no space"):
            member.unmask(question)
    full[0] = False
    answer = member.unmask(question)
    assert reborn(member, written[-1]).unmask(question) == answer


@pytest.mark.parametrize("state", [b"", b"{}", b"[]", b'{"version": 2}', b"\xff"])
def test_a_damaged_state_is_refused(state):
    member = enlist(names(3))["site-00"]
    with pytest.raises(InputError, match="state cannot be read"):
        reborn(member, state)


def test_a_new_roster_ends_the_round_and_keeps_its_number():
    play = Play(4).until("mask")
    other = enlist(names(3))["site-00"]
    moved = reborn(other, play.members["site-00"].state)
    assert moved.progress.round_ is None
    assert moved.progress.last == 1


# ---------------------------------------------------------------------------------------------------- the server


def test_who_is_late_costs_its_contribution_only():
    play = Play(7).until("mask")
    play.step("mask", without=["site-03"])
    late = play.members["site-03"].mask(play.questions["mask"]["site-03"], play.vectors["site-03"])
    with pytest.raises(InputError, match="too late"):
        play.server.receive("site-03", late)
    play.step("confirm")
    play.step("unmask")
    rest = {name: vector for name, vector in play.vectors.items() if name != "site-03"}
    assert play.server.total.tolist() == plain_sum(rest, 16)


def test_an_answer_counts_once():
    play = Play(4).until("mask")
    answer = play.members["site-00"].mask(play.questions["mask"]["site-00"], play.vectors["site-00"])
    play.server.receive("site-00", answer)
    play.server.receive("site-00", answer)
    with pytest.raises(InputError, match="twice, and not the same"):
        play.server.receive("site-00", answer[:-1] + bytes([answer[-1] ^ 1]))
    for phase in ("mask", "confirm", "unmask"):
        play.step(phase)
    assert play.server.total.tolist() == plain_sum(play.vectors, 16)


def test_the_sum_is_masked_until_the_end():
    play = Play(4).until("unmask")
    with pytest.raises(InputError, match="still masked"):
        _ = play.server.total
    assert play.server._total.tolist() != plain_sum(play.vectors, 16)


def test_more_may_answer_after_too_few_did():
    play = Play(4)
    some = {name: play.members[name].advertise(play.round_.to_bytes()) for name in names(4)}
    for name in names(2):
        play.server.receive(name, some[name])
    with pytest.raises(InputError, match="2 of 4 members are left and 3 are needed"):
        play.server.close()
    play.server.receive("site-02", some["site-02"])
    assert sorted(play.server.close()) == names(3)


@pytest.mark.parametrize("field", ["encryption", "mask"])
def test_keys_that_nobody_can_agree_with_cost_their_owner_only(field):
    play = Play(4)
    liar = play.members["site-02"]
    keys = {"encryption": public_of(new_key()), "mask": public_of(new_key()), "commitment": bytes(32), field: bytes(32)}
    signed_keys = Advertisement(**keys).signed_by(liar.identity, play.round_, liar.name)
    with pytest.raises(InputError, match="not one to agree with"):
        play.server.receive(liar.name, write(Message("advertisement", 2, signed_keys.to_bytes()), play.round_))
    for phase in PHASES:
        play.step(phase, without=[liar.name])
    assert play.server.survivors == ("site-00", "site-01", "site-03")


def lie(play: Play, holder: int, owner: int) -> None:
    """A share of a holder, as the server got it, with one bit changed."""
    told = play.server.revealed[holder]
    play.server.revealed[holder] = {**told, owner: told[owner][:-1] + bytes([told[owner][-1] ^ 1])}


@pytest.mark.parametrize("owner", [5, 6])
def test_one_false_share_is_left_out_and_more_are_noticed(owner):
    """Of a seed (5 survives) or a mask key (6 drops out); six of seven answer and five are needed."""
    play = Play(7).until("mask")
    play.step("mask", without=["site-06"])
    play.step("confirm")
    play.collect("unmask")
    lie(play, 0, owner)
    honest = dict(play.server.revealed)
    lie(play, 1, owner)
    with pytest.raises(InputError, match=f"the shares of 'site-0{owner}' do not fit .*; the sum stays masked"):
        play.server.close()
    play.server.revealed = honest
    play.server.close()
    rest = {name: vector for name, vector in play.vectors.items() if name != "site-06"}
    assert play.server.total.tolist() == plain_sum(rest, 16)


def test_a_false_share_among_just_enough_is_noticed():
    play = Play(7).until("unmask")
    play.collect("unmask", without=["site-05", "site-06"])
    lie(play, 4, 2)
    with pytest.raises(InputError, match="the shares of 'site-02' do not fit"):
        play.server.close()


# ------------------------------------------------------------------------------------------------------ the ring


@pytest.mark.parametrize("phase", PHASES)
def test_neighbours_on_a_ring_give_the_same_sum(phase, monkeypatch):
    monkeypatch.setattr(roster_module, "degree", lambda members: 8)  # of 16; with real degrees members are hundreds
    vectors = draw(names(16), 5, 20)
    done = masked_sum(vectors, 20, drop={"site-03": phase})
    survivors = [name for name in names(16) if name != "site-03" or phase not in BEFORE_THE_SUM]
    assert list(done.survivors) == survivors
    assert done.total.tolist() == plain_sum({name: vectors[name] for name in survivors}, 20)


@pytest.mark.slow
def test_a_roster_that_is_large_enough_for_a_ring():
    """201 members with 162 neighbours each; three drop out in three phases."""
    vectors = draw(names(201), 5, 24)
    done = masked_sum(vectors, 24, drop={"site-07": "share", "site-100": "mask", "site-200": "unmask"})
    survivors = [name for name in names(201) if name not in ("site-07", "site-100")]
    assert sorted(done.survivors) == sorted(survivors)
    assert done.total.tolist() == plain_sum({name: vectors[name] for name in survivors}, 24)


def test_the_example_of_the_page_runs(capsys):
    page = Path(__file__).parents[3] / "docs" / "masks.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out == "[   12    -4 80000] ('east', 'north', 'south', 'west')\n"


def test_without_cryptography_the_error_says_what_to_install(monkeypatch):
    from apfl.federate.secure import ciphers

    monkeypatch.setattr(ciphers, "HAZMAT", "nothing_of_this_name")
    with pytest.raises(InputError, match=r"pip install 'apfl\[flower\]'"):
        enlist(names(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vectors": {"a": np.zeros(2, int), "b": np.zeros(3, int), "c": np.zeros(2, int)}}, "one length"),
        ({"drop": {"a": "maks"}}, "did you mean 'mask'"),
        ({"drop": {"d": "mask"}}, "no member 'd'"),
        ({"bits": 65}, "bits from 1 to 64"),
    ],
)
def test_what_cannot_be_added_is_refused(given, message):
    vectors = {name: np.zeros(2, int) for name in "abc"}
    with pytest.raises(InputError, match=message):
        masked_sum(**({"vectors": vectors, "bits": 16} | given))
