"""Mutants of what makes runs trustworthy: headers, agreement, and the virtual network that checks the runner.

Each breaks one thing, and a battery of faults must notice every one of them. With those of merge, schedule, positions
and gradients (test_mutants.py) and of scores (test_score_mutants.py) there are more than a hundred and thirty.
"""

import dataclasses
import math
import zlib

import pytest
import torch

from longspan import masks
from longspan.errors import AgreementError, RankError
from longspan.run import agreement
from longspan.run.agreement import Header, Record
from tests.simulation import faults, network, waits
from tests.simulation.faults import Fault
from tests.simulation.network import Network
from tests.simulation.test_simulation import Case, ended, judged, small_plan
from tests.simulation.waits import State, WaitError

MUTANTS = {}


def mutant(function):
    """Enters a mutant: the first line of its docstring says what is wrong."""
    MUTANTS[function.__name__] = function
    return function


# -- headers -----------------------------------------------------------------------------------------------------------


def blind_to(field):
    """A receiver that does not look at one field."""

    def mutate(patch):
        original = agreement.remove_header

        def opened(expected, whole):
            form = agreement._FORM
            found = form.unpack(whole[: form.size].numpy().tobytes())
            place = [f.name for f in dataclasses.fields(Header)].index(field) + 1
            raw = list(found)
            raw[place] = getattr(expected, field)
            whole = whole.clone()
            whole[: form.size] = torch.frombuffer(bytearray(form.pack(*raw)), dtype=torch.uint8)
            return original(expected, whole)

        patch.setattr(agreement, "remove_header", opened)

    return mutate


for _field in (
    "plan",
    "call",
    "training_step",
    "direction",
    "step",
    "src",
    "dst",
    "pieces",
    "num_bytes",
    "dtype",
    "forward",
    "name",
):
    MUTANTS[f"header_blind_to_{_field}"] = blind_to(_field)


@mutant
def checksum_of_nothing(patch):
    """Every message has the same checksum."""
    patch.setattr(agreement, "_checksum", lambda message: 7)


@mutant
def checksum_of_the_beginning(patch):
    """Only the first 16 bytes are summed."""
    original = agreement._checksum
    patch.setattr(agreement, "_checksum", lambda message: original(message[:16]))


@mutant
def checksum_by_adding(patch):
    """Bytes are added up, so that their order does not matter."""
    patch.setattr(agreement, "_checksum", lambda message: int(message.sum(dtype=torch.int64)) % (1 << 32))


@mutant
def checksum_of_every_other_byte(patch):
    """Half of the bytes are not summed."""
    original = agreement._checksum
    patch.setattr(agreement, "_checksum", lambda message: original(message[::2]))


@mutant
def checksum_ignored(patch):
    """A damaged message is taken."""
    original = agreement.remove_header

    def opened(expected, whole):
        try:
            return original(expected, whole)
        except RankError as error:
            if "checksum" in str(error):
                return whole[agreement.HEADER_SIZE :]
            raise

    patch.setattr(agreement, "remove_header", opened)


@mutant
def pieces_without_name(patch):
    """All lists of pieces have one name."""
    patch.setattr(agreement, "checksum_pieces", lambda transfers: 0)


@mutant
def pieces_in_any_order(patch):
    """The order of pieces in a message does not enter their name."""
    patch.setattr(
        agreement, "checksum_pieces", lambda ts: zlib.crc32(" ".join(sorted(repr(t.piece) for t in ts)).encode())
    )


@mutant
def pieces_by_size(patch):
    """Pieces of equal size have one name."""
    patch.setattr(agreement, "checksum_pieces", lambda ts: sum(t.piece.num_tokens for t in ts))


@mutant
def message_shifted(patch):
    """The message is cut off one byte too early."""
    original = agreement.remove_header
    patch.setattr(agreement, "remove_header", lambda expected, whole: original(expected, whole).roll(1))


@mutant
def source_and_target_swapped(patch):
    """A sender writes the target's name where its own belongs."""
    original = agreement.add_header

    def sealed(header, message):
        return original(dataclasses.replace(header, src=header.dst, dst=header.src), message)

    patch.setattr(agreement, "add_header", sealed)


@mutant
def any_bytes_are_a_header(patch):
    """What has no header is taken for a message with the expected one."""
    original = agreement.remove_header

    def opened(expected, whole):
        try:
            return original(expected, whole)
        except RankError as error:
            if "without a header" in str(error):
                return whole[agreement.HEADER_SIZE :]
            raise

    patch.setattr(agreement, "remove_header", opened)


# -- agreement ---------------------------------------------------------------------------------------------------------


def silent_about(field):
    """A record that leaves a field out."""

    def mutate(patch):
        original = Record.row
        patch.setattr(Record, "row", lambda self: original(dataclasses.replace(self, **{field: ""})))

    return mutate


for _field in (
    "plan",
    "mask",
    "layout",
    "shapes",
    "dtype",
    "device",
    "scheme",
    "scale",
    "scores",
    "torch",
    "longspan",
    "name",
):
    MUTANTS[f"agreement_silent_about_{_field}"] = silent_about(_field)


@mutant
def ends_are_compared(patch):
    """Only the first and the last rank are compared."""
    original = agreement.compare
    patch.setattr(agreement, "compare", lambda rows: original([rows[0], rows[-1]]))


@mutant
def long_texts_are_cut(patch):
    """A text that does not fit is cut, without a digest of the rest."""
    width = agreement.WIDTH
    patch.setattr(agreement, "_to_fixed_size", lambda text: text.encode()[:width].ljust(width, b"\0"))


@mutant
def nobody_is_named(patch):
    """All texts are said to be on rank 0."""
    patch.setattr(agreement, "_by_rank", lambda texts: f"{texts[0]} on rank 0")


# -- the virtual network -----------------------------------------------------------------------------------------------


@mutant
def the_dead_are_waited_for(patch):
    """Nobody counts as dead."""
    patch.setattr(network, "PATIENCE", math.inf)


@mutant
def the_slow_are_dead(patch):
    """Half a second of silence is enough."""
    patch.setattr(network, "PATIENCE", 0.5)


@mutant
def nobody_is_waited_for(patch):
    """Who is alive but late is given up after a second."""
    patch.setattr(network, "TIMEOUT", 1.0)


@mutant
def the_neighbour_is_blamed(patch):
    """The rank that is waited for is named, not the one that it waits for."""
    original = waits.Graph.culprit

    def culprit(self, number):
        found, rank = original(self, number), self.ranks[number]
        missing = [src for src, _ in rank.missing()]
        return dataclasses.replace(found, rank=missing[0]) if missing else found

    patch.setattr(waits.Graph, "culprit", culprit)


@mutant
def the_messenger_is_blamed(patch):
    """A rank that failed because of another is named instead of it."""
    patch.setattr(waits.Graph, "_first_cause", lambda self, culprit: culprit)


@mutant
def lost_messages_are_on_their_way(patch):
    """A message that was lost counts as flying for ever."""
    patch.setattr(faults, "spoiled", lambda fault, copies, draw: (list(copies), 0.0))
    patch.setattr(network, "spoiled", lambda fault, copies, draw: (list(copies), 0.0))


@mutant
def leftovers_are_ignored(patch):
    """Messages that nobody took are forgotten."""
    original = Network._end

    def end(self):
        for rank in self.ranks:
            rank.queues.clear()
        original(self)

    patch.setattr(Network, "_end", end)


@mutant
def pairs_are_reordered(patch):
    """Messages of one pair overtake each other."""
    original = Network._send

    def send(self, rank, dst, message):
        self._arrival.clear()
        original(self, rank, dst, message)

    patch.setattr(Network, "_send", send)


@mutant
def the_sender_keeps_writing(patch):
    """Messages are the sender's own memory, not copies of it."""
    original = Network._opened
    patch.setattr(Network, "_opened", lambda self, exchange, src, rank: original(self, exchange, src, rank).zero_())


@mutant
def the_original_error_is_lost(patch):
    """Other ranks do not hear what a rank raised."""
    patch.setattr(waits.Culprit, "text", lambda self, waiting, now: f"rank {self.rank} failed in step {self.step}.")


# -- the battery -------------------------------------------------------------------------------------------------------


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def refuses(call, error, *says):
    """Whether a call raises this error with these words."""
    try:
        call()
    except error as caught:
        expect(all(word in str(caught) for word in says), f"{says} not in: {caught}")
    else:
        raise AssertionError(f"nothing was refused: {says}")


HEADER = Header(b"abcdefgh", 3, 5, 1, 2, 0, 1, 77, 40, b"float32\0")
OTHERS = {
    "plan": b"abcdefgx", "call": 4, "training_step": 6, "direction": 2, "step": 3, "src": 2, "dst": 3, "pieces": 78,
    "num_bytes": 41, "dtype": b"bfloat16", "forward": 9, "name": 7,
}  # fmt: skip


def check_headers():
    message = torch.arange(40, dtype=torch.uint8)
    whole = agreement.add_header(HEADER, message)
    expect(torch.equal(agreement.remove_header(HEADER, whole.clone()), message), "the message is not what it was")
    for field, value in OTHERS.items():
        other = dataclasses.replace(HEADER, **{field: value})
        refuses(lambda other=other: agreement.remove_header(other, whole.clone()), RankError, field)
        refuses(
            lambda other=other: agreement.remove_header(HEADER, agreement.add_header(other, message)), RankError, field
        )
    for place in range(agreement.HEADER_SIZE, len(whole)):
        damaged = whole.clone()
        damaged[place] ^= 4
        refuses(lambda damaged=damaged: agreement.remove_header(HEADER, damaged), RankError, "checksum")
    swapped = whole.clone()
    swapped[-2:] = whole[-2:].flip(0)
    refuses(lambda: agreement.remove_header(HEADER, swapped), RankError, "checksum")
    refuses(lambda: agreement.remove_header(HEADER, torch.zeros_like(whole)), RankError, "without a header")
    transfers = list(small_plan(masks.full(32)).steps(0)[0].transfers)
    names = {agreement.checksum_pieces(part) for part in (transfers, transfers[::-1], transfers[:1], transfers[1:], [])}
    expect(len(names) == 5, "different pieces have one name")


def check_agreement():
    record = Record(*(f"{f.name} a" for f in dataclasses.fields(Record)))
    agreement.compare([record.row()] * 3)
    for field in dataclasses.fields(Record):
        for text in (f"{field.name} b", "x" * 60):
            rows = [record.row(), dataclasses.replace(record, **{field.name: text}).row(), record.row()]
            refuses(
                lambda rows=rows: agreement.compare(rows), AgreementError, field.name, "on rank 1", "no data was sent"
            )
    long = [dataclasses.replace(record, scores="x" * 60 + end).row() for end in "ab"]
    refuses(lambda: agreement.compare(long), AgreementError, "scores")


FAULTS = [
    None,
    Fault("kill", 2, 0),
    Fault("kill", 1, 1),
    Fault("stop", 1, 1, seconds=1.0),
    Fault("stop", 2, 1),
    Fault("raise", 3, 1),
    Fault("skip", 0, 0),
    Fault("lose", 0, 0, dst=1),
    Fault("double", 1, 1, dst=2),
    Fault("double", 1, 2, dst=2),
    Fault("late", 2, 1, dst=3, seconds=10.0),
    Fault("short", 0, 1, dst=1),
    Fault("damage", 3, 0, dst=0),
]


def check_network(case):
    for number, fault in enumerate(FAULTS):
        for seed in range(2):
            made = Network(
                100 * number + seed, [] if fault is None else [fault], plans=case.plan.fingerprint, slow=20.0
            )
            caught = None
            try:
                made.run(case.programs("forward"))
            except Exception as error:
                caught = error
            judged(made, case, "forward", fault, caught)
            harmless = fault is None or fault.kind == "late" or fault.seconds == 1.0
            expect((caught is None) == harmless, f"{fault}: {caught}")
            if fault is not None and fault.kind in ("kill", "stop"):
                for rank in made.ranks:
                    if isinstance(rank.error, WaitError):
                        expect(rank.error.culprit.rank == fault.rank, f"rank {rank.error.culprit.rank} is blamed")
                        expect(rank.error.culprit.state is not State.FAILED, "a messenger is blamed")
                        expect("no sign of life" in str(rank.error), str(rank.error))


@pytest.fixture(scope="module")
def case():
    return Case(small_plan(masks.full(32)), 0)


def first_failure(case):
    """What the battery finds, or None."""
    try:
        check_headers()
        check_agreement()
        check_network(case)
    except (AssertionError, RankError, AgreementError, RuntimeError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def test_the_battery_is_content(case):
    assert first_failure(case) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, case, monkeypatch):
    with monkeypatch.context() as patch:
        MUTANTS[name](patch)
        failure = first_failure(case)
    assert failure is not None, f"{name} lives: {MUTANTS[name].__doc__}"


def test_there_are_more_than_sixty():
    from tests.mutants import test_mutants, test_score_mutants

    here, before = len(MUTANTS), len(test_mutants.MUTANTS)
    assert here >= 40
    assert here + before + len(test_score_mutants.MUTANTS) >= 130
    assert not ended(Network(0), Case(small_plan(), 1).programs("forward"))
