"""A server that is curious with t - 1 members, or lies with fewer than a third of them, unmasks nobody.

Every attack is run again with one member more, or without the guard that it meets, and then succeeds: so these tests
can fail.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate.secure import Aggregator, Member, Roster, enlist
from apfl.federate.secure import roster as roster_module
from apfl.federate.secure.ciphers import is_signed
from apfl.federate.secure.keys import Advertisement, survived
from apfl.federate.secure.messages import SERVER, Message, bitmap, members_of, read, write
from tests.federate.secure.attacker import Attacker
from tests.federate.secure.toys import Play, names

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

K = 7  # members; the threshold is 5


def true_vector(play: Play, victim: int) -> list[int]:
    return [int(value) % 2**16 for value in play.vectors[play.roster.names[victim]]]


def eavesdropper(play: Play, colluding: list[int]) -> Attacker:
    """What server and colluding members know after a round that went as it should."""
    every = play.roster.names
    attacker = Attacker(play.round_, play.roster, [play.members[every[i]] for i in colluding])
    for answers in play.answers.values():
        for name, answer in answers.items():
            attacker.take(play.members[name], answer)
    for name, question in play.questions["mask"].items():
        told = read(question, "delivery", play.round_, play.roster).fixed
        attacker.partners[play.roster.number(name)] = members_of(told, play.roster)
    return attacker


# ---------------------------------------------------------------------------------------------------- the passive


@pytest.mark.parametrize(
    ("k", "t", "dropped"), [(4, 3, None), (7, 5, None), (7, 5, "site-06"), (7, 5, "site-00"), (9, 7, "site-08")]
)
def test_a_curious_server_with_one_member_less_than_the_threshold_unmasks_nobody(k, t, dropped):
    """Also a member that dropped out, and whose masked vector came too late; one member more unmasks everyone.

    Two honest members survive in each case: of one, the sum would tell the vector.
    """
    play, without = Play(k).until("mask"), [dropped] if dropped else []
    late = {name: play.members[name].mask(play.questions["mask"][name], play.vectors[name]) for name in without}
    play.step("mask", without=without)
    play.step("confirm")
    play.step("unmask")
    play.answers["late"] = late
    for colluding in (list(range(t - 1)), list(range(1, t))):
        attacker = eavesdropper(play, colluding)
        for victim in set(range(k)) - set(colluding):
            assert attacker.guess(victim) != true_vector(play, victim)
    stronger = eavesdropper(play, list(range(t)))
    for victim in range(t, k):
        assert stronger.guess(victim) == true_vector(play, victim)


# ----------------------------------------------------------------------------------------------------- the active


class Siege:
    """A lying server with colluding members against a victim, phase by phase; refusals are noted, not fatal."""

    def __init__(self, colluding: int, k: int = K) -> None:
        self.play = Play(k).until("share")
        every = list(self.play.members.values())
        self.honest, self.bad = every[: k - colluding], every[k - colluding :]
        self.victim = self.honest[0]
        self.refusals: list[str] = []
        self.attacker = Attacker(self.play.round_, self.play.roster, self.bad)
        for name, answer in self.play.answers["advertise"].items():
            self.attacker.take(self.play.members[name], answer)
        for member in every:
            self.ask(member, "share", self.play.questions["share"][member.name])

    def ask(self, member: Member, phase: str, *question) -> bytes | None:
        try:
            answer = getattr(member, phase)(*question)
        except InputError as error:
            self.refusals.append(str(error))
            return None
        self.attacker.take(member, answer)
        return answer

    def mask(self, told: dict[int, set[int]]) -> None:
        """Tell each member its own list of those that shared keys."""
        for member in (*self.honest, *self.bad):
            question = self.attacker.delivery(member, told.get(member.number, set(range(K))))
            self.ask(member, "mask", question, self.play.vectors[member.name])

    def unmask(self, told: dict[int, set[int]]) -> None:
        """Tell each honest member its own list of survivors, and give each all signatures of that list."""
        signed: dict[frozenset[int], dict[int, bytes]] = {}
        for member in self.honest:
            listed = frozenset(told[member.number])
            answer = self.ask(member, "confirm", self.attacker.survivors(member, listed))
            if answer:
                signature = read(answer, "confirmation", self.play.round_, self.play.roster, member.number).fixed
                signed.setdefault(listed, {})[member.number] = signature
        for member in self.honest:
            listed = frozenset(told[member.number])
            self.ask(member, "unmask", self.attacker.signatures(listed, signed.get(listed, {})))

    @property
    def won(self) -> bool:
        victim = self.victim.number
        return victim in self.attacker.masked and self.attacker.guess(victim) == true_vector(self.play, victim)


def take_out(monkeypatch, *guards: str) -> None:
    for guard in guards:
        owner = Roster if guard == "check_survivors" else Member
        monkeypatch.setattr(owner, guard, lambda *given: None)


@pytest.mark.parametrize("told_survived", [n for size in range(5) for n in combinations(range(5), size)])
def test_two_lists_of_survivors_for_two_groups(told_survived):
    """Some hear that the victim survived and give shares of its seed, the others give shares of its mask key."""
    siege = Siege(colluding=2)
    siege.mask({})
    everyone = set(range(K))
    siege.unmask({i: everyone if i in told_survived else everyone - {0} for i in range(5)})
    assert not siege.won
    assert siege.refusals


def test_two_lists_of_survivors_work_with_a_third_of_the_members():
    siege = Siege(colluding=3)
    siege.mask({})
    everyone = set(range(K))
    siege.unmask({0: everyone, 1: everyone, 2: everyone - {0}, 3: everyone - {0}})
    assert siege.won


BOTH = ("_check_receipts", "_check_signatures")


@pytest.mark.parametrize("without", [(), BOTH[:1], BOTH[1:], BOTH])
def test_a_list_of_its_own_for_everybody(without, monkeypatch):
    """The victim masks against as few as it accepts, and the others hear that those few dropped out.

    Members 0 (the victim), 1, 2, 3, 4 are honest, 5 and 6 collude. The victim masks against 1, 2, 5, 6. The mask keys
    of 1 and 2 need five shares: two collude, 3 and 4 hear that both dropped out, 1 and 2 that the other one did.
    Either guard alone stops it: signatures on one list, and receipts that all masked against the same list.
    """
    take_out(monkeypatch, *without)
    siege = Siege(colluding=2)
    siege.mask({0: {0, 1, 2, 5, 6}})
    siege.unmask({0: {0, 1, 2, 5, 6}, 1: {0, 1, 3, 5, 6}, 2: {0, 2, 3, 5, 6}, 3: {0, 3, 4, 5, 6}, 4: {0, 3, 4, 5, 6}})
    assert siege.won == (without == BOTH)
    assert bool(siege.refusals) == (without != BOTH)


FEW = ("check_survivors", "_check_receipts")


@pytest.mark.parametrize("without", [(), FEW[:1], FEW[1:], FEW])
def test_a_victim_that_masks_only_against_those_who_collude(without, monkeypatch):
    take_out(monkeypatch, *without)
    siege = Siege(colluding=2)
    siege.mask({0: {0, 5, 6}})
    if siege.victim.number not in siege.attacker.masked:
        siege.attacker.receipts[0] = bytes(64)
    siege.unmask({i: set(range(K)) for i in range(5)})
    assert siege.won == (without == FEW)


@pytest.mark.parametrize("guarded", [True, False])
def test_asking_twice_with_two_lists(guarded):
    """Nobody colludes: the whole round, and then the end of it again, in which the victim dropped out.

    Without the guard means: with the state from before the list of survivors, which must not be restored.
    """
    siege = Siege(colluding=0)
    siege.mask({})
    before = {member.name: member.state for member in siege.honest}
    everyone = set(range(K))
    siege.unmask(dict.fromkeys(everyone, everyone))
    assert not siege.refusals
    if not guarded:
        siege.honest = [
            Member(each.name, each.identity, each.roster, federation=each.federation, state=before[each.name])
            for each in siege.honest
        ]
    siege.unmask(dict.fromkeys(everyone, everyone - {0}))
    assert siege.won is not guarded
    if guarded:
        assert sum("answers it only once" in refusal for refusal in siege.refusals) == 2 * K


def test_signatures_of_another_list_count_for_nothing():
    """All sign one list, and are shown signatures of another."""
    siege = Siege(colluding=2)
    siege.mask({})
    everyone = frozenset(range(K))
    for member in siege.honest:
        siege.ask(member, "confirm", siege.attacker.survivors(member, everyone))
    shown = siege.attacker.signatures(everyone - {0}, {})
    for member in siege.honest:
        siege.ask(member, "unmask", shown)
    assert all("0 members signed" in refusal for refusal in siege.refusals)
    assert len(siege.refusals) == len(siege.honest)
    assert not siege.won


# ------------------------------------------------------------------------------------------------- invented members


def puppet(name: str, victim: Member) -> Member:
    """A member of the victim's roster with an identity that the roster does not know."""
    made = enlist(names(K))[name]
    made.roster = victim.roster
    return made


@pytest.mark.parametrize("guarded", [True, False])
def test_a_server_that_plays_everyone_else(guarded, monkeypatch):
    """The victim is real, all other members are the server's: their keys are not signed by the roster's identities."""
    victim = enlist(names(K))["site-00"]
    if not guarded:
        monkeypatch.setattr(Advertisement, "is_of", lambda *given: True)
    puppets = {name: puppet(name, victim) for name in names(K)[1:]}
    play = Play(members={"site-00": victim, **puppets})
    answers = {name: member.advertise(play.round_.to_bytes()) for name, member in play.members.items()}
    attacker = Attacker(play.round_, play.roster, list(puppets.values()))
    for name, answer in answers.items():
        attacker.take(play.members[name], answer)
    keys = {i: attacker.advertised[i].to_bytes() for i in range(1, K)}
    question = write(Message("advertisements", SERVER, records=keys), play.round_)
    if guarded:
        with pytest.raises(InputError, match="did not sign for this round"):
            victim.share(question)
        return
    attacker.take(victim, victim.share(question))
    for other in puppets.values():
        records = {i: attacker.advertised[i].to_bytes() for i in range(K) if i != other.number}
        attacker.take(other, other.share(write(Message("advertisements", SERVER, records=records), play.round_)))
    attacker.take(victim, victim.mask(attacker.delivery(victim, range(K)), play.vectors["site-00"]))
    assert attacker.guess(0) == true_vector(play, 0)


def test_keys_of_another_round_are_not_taken_for_this_one():
    """The server kept the signed keys of an earlier round, in which it learnt a member's mask key."""
    play = Play(4)
    play.until("share")
    old = play.server.advertised
    later = Play(members=play.members)
    later.until("share")
    member = later.members["site-00"]
    mixed = {i: each.to_bytes() for i, each in later.server.advertised.items() if i} | {1: old[1].to_bytes()}
    with pytest.raises(InputError, match="keys for 'site-01' given that the roster's 'site-01' did not sign"):
        member.share(write(Message("advertisements", SERVER, records=mixed), later.round_))


# --------------------------------------------------------------------------------------------------- replayed rounds


@pytest.mark.parametrize("guarded", [True, False])
def test_another_vector_in_the_same_round(guarded):
    """Two vectors under the same masks tell their difference."""
    play = Play(4).until("mask")
    member, question = play.members["site-00"], play.questions["mask"]["site-00"]
    before, first, second = member.state, np.arange(5), np.array([3, 1, 4, 1, 5])
    attacker = Attacker(play.round_, play.roster, [])
    attacker.take(member, member.mask(question, first))
    payloads = [attacker.masked[0]]
    if guarded:
        with pytest.raises(InputError, match="another vector given in the same round"):
            member.mask(question, second)
        return
    old = Member(member.name, member.identity, member.roster, federation=member.federation, state=before)
    attacker.take(old, old.mask(question, second))
    payloads.append(attacker.masked[0])
    one, other = (np.frombuffer(payload, "<u2").astype(int) for payload in payloads)
    assert ((other - one) % 2**16 == (second - first) % 2**16).all()


def test_a_round_never_repeats():
    play = Play(4)
    member = play.members["site-00"]
    first = member.advertise(play.round_.to_bytes())
    assert member.advertise(play.round_.to_bytes()) == first
    for phase in ("advertise", "share", "mask", "confirm", "unmask"):
        play.step(phase)
    later = Play(members=play.members).until("confirm")
    assert later.round_.number == 2
    with pytest.raises(InputError, match="round 1 given after round 2; rounds never repeat"):
        member.advertise(play.round_.to_bytes())
    for phase in ("share", "confirm", "unmask"):  # what was recorded in the first round
        with pytest.raises(InputError, match=r"another|out of turn"):
            getattr(member, phase)(play.questions[phase]["site-00"])


def test_the_same_number_for_another_sum_is_refused():
    play = Play(4)
    member = play.members["site-00"]
    member.advertise(play.round_.to_bytes())
    longer = Play(members=play.members, length=6).round_
    assert longer.number == 2  # the toy counts on; the server does not
    again = type(longer)(longer.federation, longer.roster, 1, longer.purpose, 6, 16)
    with pytest.raises(InputError, match="rounds never repeat"):
        member.advertise(again.to_bytes())


def test_signatures_serve_for_one_round_only():
    """Recorded signatures on the list of survivors, of a round with the same survivors."""
    play = Play(4)
    for phase in ("advertise", "share", "mask", "confirm", "unmask"):
        play.step(phase)
    old = play.server.signatures
    later = Play(members=play.members).until("confirm")
    later.collect("confirm")
    replayed = write(Message("confirmations", SERVER, records=old), later.round_)
    with pytest.raises(InputError, match="0 members signed"):
        later.members["site-00"].unmask(replayed)


# ------------------------------------------------------------------------------------------------------------ a ring


class Lenient(Roster):
    """A server that minds no dropouts."""

    def check_survivors(self, survivors, least):
        pass


@pytest.mark.parametrize("guarded", [True, False])
def test_a_server_that_lets_the_neighbours_of_a_victim_drop_out(guarded, monkeypatch):
    """25 members with 12 neighbours; 4 of the 6 before and after the victim collude, and the other 2 "drop out"."""
    monkeypatch.setattr(roster_module, "degree", lambda members: 12)
    if not guarded:
        monkeypatch.setattr(Roster, "_thinnest", lambda *given: 25)
    play = Play(25)
    play.server = Aggregator(Lenient(play.roster.keys), play.round_)
    order = play.roster._ring
    victim, colluding = order[6], [*order[1:5], *order[8:12]]
    dropped = [order[i] for i in (0, 5, 7, 12)]
    assert len(colluding) < 25 / 3
    for phase in ("advertise", "share", "mask"):
        play.step(phase, without=[play.roster.names[i] for i in dropped] if phase == "mask" else [])
    if guarded:
        with pytest.raises(InputError, match="neighbours dropped out; nothing is unmasked"):
            play.step("confirm")
    else:
        play.step("confirm")
        play.step("unmask")
    attacker = eavesdropper(play, colluding)
    assert (attacker.guess(victim) == true_vector(play, victim)) is not guarded


# ------------------------------------------------------------------------------------------------ what is never said


def test_a_member_reveals_one_share_of_each_and_never_both():
    play = Play(K).until("mask")
    play.step("mask", without=["site-06"])
    play.step("confirm")
    play.step("unmask")
    for name, answer in play.answers["unmask"].items():
        revealed = read(answer, "unmasking", play.round_, play.roster, play.roster.number(name)).records
        kinds = {owner: share[:1] for owner, share in revealed.items()}
        assert kinds == {owner: b"k" if owner == 6 else b"s" for owner in range(K)}


def test_a_member_has_a_minimum_cohort_of_its_own():
    members = enlist(names(5))
    members["site-00"].minimum = 5
    play = Play(members=members).until("mask")
    play.step("mask", without=["site-04"])
    with pytest.raises(InputError, match="4 of 5 members are left and 5 are needed"):
        members["site-00"].confirm(play.questions["confirm"]["site-00"])
    members["site-01"].confirm(play.questions["confirm"]["site-01"])


def test_a_member_signs_for_its_round_and_its_list():
    play = Play(4).until("confirm")
    play.collect("confirm")
    everyone = bitmap(range(4), play.roster)
    for number, signature in play.server.signatures.items():
        key = play.roster.keys[play.roster.names[number]]
        assert is_signed(key, signature, survived(play.round_, everyone))
        assert not is_signed(key, signature, survived(play.round_, bitmap(range(3), play.roster)))
