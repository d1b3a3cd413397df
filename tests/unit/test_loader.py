"""The loader of documents: every rank gets the part that sharding the whole batch gives, and reads nothing else."""

import threading

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.training import BatchError, DocumentLoader, TokenFile, shard_batch

RANKS = 3


def documents(seed=0, num=23):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(2.2, 1.0, num).astype(int) + 1, 60)
    return [rng.integers(0, 50_000, n).tolist() for n in lengths]


def batches_of(data, **more):
    options = {"ranks": RANKS, "tokens_per_rank": 24, "tokens_per_step": 150, "seed": 4, **more}
    return ls.batches([len(document) for document in data], **options)


def whole(micro, data, labels=None):
    """The whole micro-batch, packed into one row."""
    cut = [slice(a, a + n) for a, n in zip(micro.starts.tolist(), micro.lengths.tolist(), strict=True)]
    ids = torch.tensor([x for i, s in zip(micro.documents, cut, strict=True) for x in data[i][s]], dtype=torch.int64)[
        None
    ]
    if labels is None:
        return {"input_ids": ids, "labels": ids}
    values = torch.tensor([x for i, s in zip(micro.documents, cut, strict=True) for x in labels[i][s]])[None]
    return {"input_ids": ids, "labels": values}


def assert_same(found, expected):
    for name in ("input_ids", "shift_labels", "position_ids"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("too_long", ["refuse", "cut"])
def test_parts_are_those_of_whole_batches(rank, too_long):
    data = documents(1, 50)
    batches = batches_of(data, **({"tokens_per_rank": 15, "too_long": "cut"} if too_long == "cut" else {}))
    num = 0
    for step, micro, batch in DocumentLoader(data, batches, rank):
        expected = shard_batch(
            whole(micro, data), micro.layout, rank, documents=micro.lengths.tolist(), positions="document"
        )
        assert_same(batch, expected)
        assert batch.layout == micro.layout
        assert micro in step.micro_batches
        num += 1
    assert num == sum(len(step) for step in batches) > len(batches) > 2


@pytest.mark.parametrize("num", [50, 2])
def test_groups_read_documents_of_their_own(num):
    """With 2 documents some groups have none."""
    data = documents(9, num)
    batches = batches_of(data, ranks=6, ranks_per_group=2, tokens_per_rank=30)
    labels, empty = 0, 0
    for rank in range(6):
        for step, micro, batch in DocumentLoader(data, batches, rank):
            part = whole(micro, data)
            expected = shard_batch(part, micro.layout, rank % 2, documents=micro.lengths.tolist(), positions="document")
            assert_same(batch, expected)
            assert any(micro is mine for mine in step.micro_batches)
            labels += int((batch["shift_labels"] != -100).sum())
            empty += not len(micro.documents)
    assert labels == sum(step.labels for step in batches) == sum(len(document) - 1 for document in data)
    assert (empty > 0) == (num == 2)


class Recorded:
    """Documents that note which of them are read."""

    def __init__(self, data):
        self.data, self.seen = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.seen.append(index)
        return self.data[index]


def test_only_documents_of_the_rank_are_read():
    data = documents(2)
    batches = batches_of(data)
    read = [Recorded(data) for _ in range(RANKS)]
    for rank in range(RANKS):
        for _, micro, _ in DocumentLoader(read[rank], batches, rank):
            del micro
        edges = {}
        for step in batches:
            for micro in step:
                owner = micro.layout.owner(np.arange(micro.layout.seq_len))
                starts = np.cumsum(micro.lengths) - micro.lengths
                for number, start, length in zip(micro.documents, starts, micro.lengths, strict=True):
                    edges[int(number)] = {*owner[start : start + length].tolist()}
        assert {*read[rank].seen} == {number for number, ranks in edges.items() if rank in ranks}
    assert sum(len({*part.seen}) for part in read) < 2 * len(data)  # most documents are read by one rank


def test_a_token_file_gives_the_same(tmp_path):
    data = documents(3)
    path = tmp_path / "tokens.bin"
    np.concatenate([np.array(document, dtype=np.uint16) for document in data]).tofile(path)
    lengths = [len(document) for document in data]
    file = TokenFile(path, lengths)
    assert len(file) == len(data)
    assert file[5].tolist() == data[5]
    batches = batches_of(data)
    for rank in range(RANKS):
        loaders = (DocumentLoader(source, batches, rank) for source in (file, data))
        for ours, theirs in zip(*loaders, strict=True):
            assert_same(ours[2], theirs[2])
    with pytest.raises(BatchError, match=r"`lengths` must sum up to .* uint8"):
        TokenFile(path, lengths, dtype=np.uint8)


def test_a_token_file_refuses_tokens_of_other_documents(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(9, dtype=np.uint16).tofile(path)
    file = TokenFile(path, [3, 0, 4, 2])
    assert [document.tolist() for document in file] == [[0, 1, 2], [], [3, 4, 5, 6], [7, 8]]
    assert file[-1].tolist() == file.read(-1, 0, 2).tolist() == [7, 8]
    assert file.read(2, 4, 4).tolist() == []
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(BatchError, match=r"in \[0, 3\], the tokens of document 0, but got"):
            file.read(0, start, stop)
    for lengths in ([8, -3, 4], [4.5, 4.5], [[3, 6]], 9, ["nine"], [[3], [3, 3]], [float("nan"), 9]):
        with pytest.raises(BatchError, match="`lengths` must be a list of integers"):
            TokenFile(path, lengths)
    with pytest.raises(BatchError, match="`dtype` must be that of integers, but got float16"):
        TokenFile(path, [9], dtype=np.float16)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BatchError, match=r"which has 8\.5 of uint16, but got 9"):
        TokenFile(path, [9])
    path.write_bytes(b"")
    assert [document.tolist() for document in TokenFile(path, [0, 0])] == [[], []]


@pytest.mark.parametrize("too_long", ["refuse", "cut"])
def test_labels_of_documents_are_shifted(too_long):
    data = documents(4)
    labels = [[-100 if i % 3 else x for i, x in enumerate(document)] for document in data]
    counts = [sum(x != -100 for x in row[1:]) for row in labels]
    items = [{"input_ids": ids, "labels": row} for ids, row in zip(data, labels, strict=True)]
    is_cut = too_long == "cut"
    batches = (
        batches_of(data, labels=labels, tokens_per_rank=5, too_long="cut")
        if is_cut
        else batches_of(data, labels=counts)
    )
    total = 0
    for rank in range(RANKS):
        for _, micro, batch in DocumentLoader(items, batches, rank):
            expected = shard_batch(
                whole(micro, data, labels), micro.layout, rank, documents=micro.lengths.tolist(), positions="document"
            )
            assert_same(batch, expected)
            total += int((batch["shift_labels"] != -100).sum())
    assert total == sum(step.labels for step in batches)
    assert (total < sum(counts)) == is_cut  # the first token of a part is not predicted
    with pytest.raises(BatchError, match=r"document \d+ must have \d+ labels"):
        list(DocumentLoader(items, batches_of(data), 0))


def test_a_loop_that_stopped_resumes_at_its_step():
    data = documents(5, 60)
    batches = batches_of(data)
    everything = list(DocumentLoader(data, batches, 1))
    for stop in (1, 2, 5, len(everything) - 1):
        loader = DocumentLoader(data, batches, 1)
        received = []
        for found in loader:
            received.append(found)
            if len(received) == stop:
                break
        state = loader.state_dict()
        other = DocumentLoader(data, batches_of(data), 1)
        other.load_state_dict(state)
        rest = list(other)
        first = sum(len(step) for step in batches[: state["num_steps"]])
        assert first <= stop
        assert len(rest) == len(everything) - first
        for ours, theirs in zip(rest, everything[first:], strict=True):
            assert ours[0].number == theirs[0].number
            assert_same(ours[2], theirs[2])
    assert len(list(other)) == len(everything)  # a new epoch
    with pytest.raises(BatchError, match="fingerprint differs"):
        DocumentLoader(data, batches_of(data, seed=5), 1).load_state_dict(state)


def test_plans_are_prepared_ahead_in_a_thread():
    data = documents(6)
    batches = batches_of(data)
    threads, begun = [], []

    def prepare(micro):
        threads.append(threading.get_ident())
        begun.append(micro)

    for seen, _ in enumerate(DocumentLoader(data, batches, 0, prepare=prepare), start=1):
        assert len(begun) >= seen
    assert threading.get_ident() not in threads
    assert len(begun) == seen

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(DocumentLoader(data, batches, 0, prepare=fail))


def test_other_documents_and_ranks_are_refused():
    data = documents(7)
    batches = batches_of(data)
    with pytest.raises(BatchError, match=r"`documents` must be the 23 documents of `batches`, but got 22"):
        DocumentLoader(data[1:], batches, 0)
    with pytest.raises(BatchError, match="`rank` must be less than 3"):
        DocumentLoader(data, batches, 3)
    with pytest.raises(BatchError, match=r"document \d+ must have \d+ tokens"):
        list(DocumentLoader([document[:-1] for document in data], batches, 0))
    with pytest.raises(BatchError, match=r"document \d+ must have \d+ tokens"):  # not cut without being asked to
        list(DocumentLoader([[*document, 1] for document in data], batches, 0))
    with pytest.raises(BatchError, match=r"document \d+ must be integers, but got float64"):
        list(DocumentLoader([np.array(document) + 0.5 for document in data], batches, 0))
    with pytest.raises(BatchError, match=r"document \d+ must be token ids, but got a str"):
        list(DocumentLoader(["a" * len(document) for document in data], batches, 0))
    with pytest.raises(BatchError, match=r"`documents` must be the 23 documents .* list_iterator without a length"):
        DocumentLoader(iter(data), batches, 0)
    with pytest.raises(BatchError, match="`state` must come from a loader"):
        DocumentLoader(data, batches, 0).load_state_dict({"step": 1})


def test_a_file_with_other_lengths_is_refused(tmp_path):
    lengths = [5, 9, 6]
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    file = TokenFile(tmp_path / "tokens.bin", lengths)
    assert file[-1].tolist() == file[2].tolist() == [*range(14, 20)]
    with pytest.raises(IndexError):
        file[3]
    assert len(list(DocumentLoader(file, ls.batches(lengths, ranks=2, tokens_per_rank=10), 0))) == 1
    with pytest.raises(BatchError, match="document 1 has 9 tokens instead of 10"):
        DocumentLoader(file, ls.batches([5, 10, 5], ranks=2, tokens_per_rank=10), 0)


def test_datasets_of_hugging_face_are_read():
    datasets = pytest.importorskip("datasets")
    data = documents(8)
    batches = batches_of(data)
    loaded = datasets.Dataset.from_dict({"input_ids": data})
    for ours, theirs in zip(DocumentLoader(loaded, batches, 2), DocumentLoader(data, batches, 2), strict=True):
        assert_same(ours[2], theirs[2])
