"""What masking costs against a plain sum: seconds and bytes of one member and of the server; the masks' throughput.

    python benchmarks/masks.py [--members 3,10,100,1000] [--widths 1024,4096] [--classes 100] [--bits 16]
    python benchmarks/masks.py --data FEATURES.npz [--members 3,10,100] [--widths 1024] [--alpha 0.5] [--landmarks free]

With FEATURES.npz (or digits) a federation sums its statistics up for real, with the bits that `apfl` chooses: what
one site sends under masks, beside the same integers in the agreed bits, and packed in as few bits as a plain site needs
for them.

A vector has the d (d + 1) / 2 + d c numbers of a member's statistics. Seconds are the processor's, on one thread. One
member goes through all phases of a round with real messages; the others are played: their keys, receipts and
signatures are real, and their shares are zeros under the right keys. The server's seconds are measured on one member
(check and add its masked vector, join its seed, subtract its self-mask) and multiplied by their number, without
dropouts. Each member that drops out after it shared keys costs the server a mask for each of its neighbours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data import load_dataset
from apfl.experiments.run import Protocol, federate
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.purposes import WIDE, Purpose, round_of
from apfl.federate.secure import PHASES, Member, Round, bits_for_sum, enlist
from apfl.federate.secure.ciphers import encrypt, keystream, sign
from apfl.federate.secure.keys import Advertisement, Pair, masked_with, survived
from apfl.federate.secure.masks import BLOCK_BYTES, add_masks, add_packed, pack, word
from apfl.federate.secure.messages import SERVER, Message, bitmap, read, write
from apfl.federate.secure.ring import degree
from apfl.federate.secure.shamir import SHARE_BYTES, join, split
from apfl.methods import load_method


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def alternating(repeats: int, *calls: Callable[[], object]) -> list[float]:
    """Median processor seconds of each call; they take turns."""
    turns = [[timed(call)[1] for call in calls] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


class Played:
    """The questions that one member gets in a round with many others."""

    def __init__(self, members: dict[str, Member], round_: Round) -> None:
        self.members, self.round_ = list(members.values()), round_
        self.one = self.members[0]
        self.roster = self.one.roster
        self.near = sorted(self.roster.neighbours(self.one.number))
        self.everyone = bitmap(range(len(self.roster)), self.roster)
        self.advertised = {i: self._advertised(self.members[i]) for i in (*self.near, self.one.number)}

    def _advertised(self, member: Member) -> Advertisement:
        answer = member.advertise(self.round_.to_bytes())
        return Advertisement.from_bytes(read(answer, "advertisement", self.round_, self.roster, member.number).fixed)

    def question(self, phase: str) -> bytes:
        if phase == "advertise":
            return self.round_.to_bytes()
        fixed = self.everyone if phase in ("mask", "confirm") else b""
        kinds = dict(zip(PHASES[1:], ("advertisements", "delivery", "survivors", "confirmations"), strict=True))
        records = {"share": self._keys, "mask": self._shares, "confirm": self._receipts, "unmask": self._signatures}
        return write(Message(kinds[phase], SERVER, fixed, records[phase]()), self.round_)

    def _keys(self) -> dict[int, bytes]:
        return {i: self.advertised[i].to_bytes() for i in self.near}

    def _shares(self) -> dict[int, bytes]:
        return {i: self._sealed(self.members[i]) for i in self.near}

    def _sealed(self, other: Member) -> bytes:
        pair = Pair(self.round_, other.name, self.one.name)
        key = pair.sending_key(other.progress.encryption, self.advertised[self.one.number].encryption)
        return encrypt(key, bytes(2 * SHARE_BYTES), self.round_.id)

    def _receipts(self) -> dict[int, bytes]:
        others = (self.members[i] for i in self.near)
        return {m.number: sign(m.identity, masked_with(self.round_, m.name, self.everyone)) for m in others}

    def _signatures(self) -> dict[int, bytes]:
        statement = survived(self.round_, self.everyone)
        return {m.number: sign(m.identity, statement) for m in self.members}


def member_cost(n_members: int, length: int, bits: int) -> dict[str, float]:
    """Seconds and bytes of one member, by phase and in all."""
    members = enlist([f"site-{i:04}" for i in range(n_members)])
    roster = next(iter(members.values())).roster
    played = Played(members, Round("in-process", roster.fingerprint, 1, "bench", length, bits))
    vector = np.random.default_rng(0).integers(-(2**15), 2**15, length)
    cost = {"sent": 0.0, "received": 0.0}
    for phase in PHASES:
        question = played.question(phase)
        given = (question, vector) if phase == "mask" else (question,)
        answer, cost[phase] = timed(lambda phase=phase, given=given: getattr(played.one, phase)(*given))
        cost["sent"] += len(answer)
        cost["received"] += len(question)
    return cost


def server_cost(n_members: int, length: int, bits: int) -> float:
    """Seconds for all members, from one: its vector, its seed, its self-mask."""
    packed, total = pack(np.arange(length, dtype=word(bits)), bits), np.zeros(length, word(bits))
    needed = 2 * (degree(n_members) + 1) // 3 + 1
    shares = split(os.urandom(32), needed, range(1, needed + 1))
    join(shares, needed)  # weights are shared by members with the same holders
    steps = (
        lambda: add_packed(total, packed, bits), lambda: join(shares, needed),
        lambda: add_masks(total, [(os.urandom(32), False)]),
    )  # fmt: skip
    return n_members * sum(alternating(3, *steps))


def plain_cost(n_members: int, length: int) -> tuple[float, float]:
    """Seconds of a plain sum of 16-bit numbers: to write one member's bytes, and to add everybody's."""
    vector, total = np.random.default_rng(0).integers(-(2**15), 2**15, length), np.zeros(length, np.int64)
    sent = vector.astype("<i2").tobytes()
    member, server = alternating(
        3, lambda: vector.astype("<i2").tobytes(), lambda: np.add(total, np.frombuffer(sent, "<i2"), out=total)
    )
    return member, n_members * server


def throughput(length: int, masks: int = 9) -> None:
    """Masks that are made and added, against the bare cipher, in turns."""
    vector, keys = np.zeros(length, np.uint32), [os.urandom(32) for _ in range(masks)]
    zeros, buffer = bytes(BLOCK_BYTES), np.empty(BLOCK_BYTES, np.uint8)

    def bare() -> None:
        for key in keys:
            stream = keystream(key)
            for _ in range(-(-4 * length // BLOCK_BYTES)):
                stream.update_into(zeros, buffer)

    ours, cipher = alternating(5, lambda: add_masks(vector, [(key, True) for key in keys]), bare)
    n = 4 * length * masks / 1e9
    print(f"masks: {n / ours:.2f} GB/s; bare AES-256-CTR: {n / cipher:.2f} GB/s; ratio {cipher / ours:.2f}\n")


def real_bytes(dataset: Any, n_sites: int, d: int, told: argparse.Namespace) -> str:
    """A line of the table: one masked sum of statistics over a federation of this dataset's rows."""
    federation = federate(dataset, Protocol(n_clients=n_sites, alpha=told.alpha), 0)
    method = load_method("apfl", map="landmarks", landmarks=told.landmarks, normalise="root", d_primary=d)
    n_features = federation.train[0].features.shape[1]
    terms = Terms("f", method=method, class_names=federation.class_names, n_features=n_features, masked=True)
    heard: list[tuple[str, str, str, bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        sites = [
            Site(Path(folder), f"site-{k:03}", shard, federation.class_names, rounding_seed=k)
            for k, shard in enumerate(federation.train)
        ]
        with Coordinator(Path(folder) / "server", terms) as server:
            masked = MaskedFederation(server, sites, overhear=lambda *each: heard.append(each))
            masked.sum_up()
            agreed, landmarks, counts = server.terms, server.pool.landmarks, masked.cohort.counts
            assert landmarks is not None
            layout = landmarks.encoding(agreed).layout
            wide = Purpose("statistics", WIDE)
            _, former = round_of(wide, 1, masked.cohort.roster, agreed, counts, landmarks)
        sent = [len(answer) for what, phase, _, answer in heard if (what, phase) == ("statistics", "mask")]
        packed = [path.stat().st_size for path in Path(folder).glob("f/*/sent-*.safetensors")]
    again, plain, mean = len(sent) > n_sites, layout.n_bytes, statistics.mean(packed)
    once = sum(sent) / n_sites
    return (
        f"| {n_sites} | {d} | {agreed.bits} | {former.sum_bits} | {(8 * sent[0]) / layout.size:.1f} | {once / 1e6:.2f}"
        f"{' (twice)' if again else ''} | {once / plain:.2f} | {former.length * former.sum_bits / 8 / plain:.2f} "
        f"| {once / mean:.1f} |"
    )


def automatic(told: argparse.Namespace) -> None:
    dataset = load_dataset(told.data)
    print("| K | d | bits | bits with room for K ranges | bits an entry | MB up | / agreed | before | / packed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for d in map(int, told.widths.split(",")):
        for n_sites in map(int, told.members.split(",")):
            print(real_bytes(dataset, n_sites, d, told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", default="3,10,100,1000")
    parser.add_argument("--widths", default="1024,4096")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--data")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--landmarks", default="federation")
    told = parser.parse_args()
    if told.data:
        automatic(told)
        return
    throughput(4096 * 4097 // 2)
    print("| K | neighbours | d | bits | MB up | / plain | MB down | member, s | of it masks | server, s | plain, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for d in map(int, told.widths.split(",")):
        length = d * (d + 1) // 2 + d * told.classes
        for n_members in map(int, told.members.split(",")):
            bits = bits_for_sum(told.bits, n_members)
            cost, server = member_cost(n_members, length, bits), server_cost(n_members, length, bits)
            plain_member, plain_server = plain_cost(n_members, length)
            plain_bytes = length * told.bits / 8
            print(
                f"| {n_members} | {degree(n_members)} | {d} | {bits} | {cost['sent'] / 1e6:.2f} "
                f"| {cost['sent'] / plain_bytes:.2f} | {cost['received'] / 1e6:.3f} "
                f"| {sum(cost[phase] for phase in PHASES):.2f} | {cost['mask']:.2f} | {server:.2f} "
                f"| {plain_member:.3f} + {plain_server:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
