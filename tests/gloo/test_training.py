"""Training glue: what a rank is fed, and losses, gradients and rows over Gloo ranks against one process."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import longspan as ls
from longspan.run.relayout import moves
from longspan.training import BatchError, shard_batch, shift_tokens, token_loss
from longspan.training.batch import document_numbers
from tests.cases import LAYOUTS, random_layout, random_lengths
from tests.gloo import training_work
from tests.jobs.runner import torchrun
from tests.pool import pool

ROOT = Path(__file__).parents[2]
WAIT = 200.0


# -- what a rank is fed ------------------------------------------------------------------------------------------------


def random_batch(seed):
    rng = np.random.default_rng(seed)
    total, world, rows = int(rng.integers(1, 50)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    if total == rows:
        total += 1
    lengths = [random_lengths(rng, total) for _ in range(rows if seed % 2 else 1)]
    mask = ls.masks.documents(lengths[0]) & ls.masks.causal()
    layout = random_layout(rng, LAYOUTS[seed % len(LAYOUTS)], mask.resized(total), total, world)
    labels = torch.as_tensor(rng.integers(0, 100, size=(rows, total)))
    kept = torch.as_tensor(rng.random((rows, total)) < 0.7)
    documents = None if seed % 5 == 0 else lengths if seed % 2 else lengths[0]
    if documents is None:
        lengths = [np.array([total])]
    return layout, labels, kept, documents, [lengths[row % len(lengths)] for row in range(rows)]


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(80))
def test_labels_and_positions_are_those_of_whole_documents(seed):
    layout, labels, kept, documents, lengths = random_batch(seed)
    rows, total = labels.shape
    batch = {"input_ids": labels + 1, "labels": labels, "loss_mask": kept, "scale": 2.0}
    positions = "document" if documents is not None else ("sequence", None)[seed % 2]
    for rank in range(layout.world_size):
        mine = shard_batch(
            batch, layout, rank, documents=documents, positions=positions, num_shifts=3, pad_id=7, ignore_index=-5
        )
        assert mine["scale"] == 2.0
        for row in range(rows):
            document = np.repeat(np.arange(len(lengths[row])), lengths[row])
            starts = np.cumsum(lengths[row]) - lengths[row]
            for slot, place in enumerate(layout.positions(rank).tolist()):
                real = place < total
                assert mine["input_ids"][row, slot] == (labels[row, place] + 1 if real else 7)
                assert mine["position_ids"][row, slot] == (place - starts[document[place]] if real else 0)
                for shift, name in ((1, "shift_labels"), (2, "shift_labels_2"), (3, "shift_labels_3")):
                    aim = place + shift
                    counts = real and aim < total and document[aim] == document[place] and bool(kept[row, aim])
                    assert mine[name][row, slot] == (labels[row, aim] if counts else -5), (name, row, place)
                assert bool(mine["loss_mask"][row, slot]) == bool(mine["shift_labels"][row, slot] != -5)


def test_labels_that_are_shifted_already_are_not_shifted_again():
    ids, layout = torch.arange(10, 18), ls.layouts.zigzag(8, 2)
    given = {"labels": ids}, {"shift_labels": shift_tokens(ids, 1, documents=[5, 3], fill=-100)}
    for rank in range(2):
        parts = [
            shard_batch(batch, layout, rank, documents=[5, 3], positions="sequence", num_shifts=3) for batch in given
        ]
        assert parts[0].keys() == parts[1].keys()
        assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])


def test_positions_of_three_axes_and_named_tensors_are_cut_along_their_tokens():
    layout = ls.layouts.contiguous(7, 2, equal_tokens=True)
    places = torch.arange(42).view(3, 2, 7)
    batch = {
        "input_ids": torch.arange(14).view(2, 7),
        "position_ids": places,
        "pixels": torch.arange(28.0).view(7, 4),
        "table": torch.zeros(7),
        "other": torch.zeros(3),
    }
    mine = shard_batch(batch, layout, 1, dims={"pixels": 0, "table": None}, fills={"pixels": -1.0})
    assert torch.equal(mine["position_ids"], torch.cat((places[..., 4:], torch.zeros(3, 2, 1, dtype=torch.int64)), -1))
    assert torch.equal(mine["pixels"], torch.cat((batch["pixels"][4:], torch.full((1, 4), -1.0))))
    assert mine["table"] is batch["table"]
    assert mine["other"] is batch["other"]


@pytest.mark.parametrize("seed", range(30))
def test_documents_are_found_in_masks(seed):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(1, 40))
    lengths = random_lengths(rng, total)
    documents = ls.masks.documents(lengths)
    window = ls.masks.sliding_window(int(rng.integers(1, 5)))
    shape = (
        documents,
        documents & ls.masks.causal(),
        documents & window,
        documents & ls.masks.sliding_window(3, 2),
        ls.masks.prefix_lm(lengths // 3, lengths),
        ls.masks.per_head(documents & window, documents & ls.masks.causal()),
    )[seed % 6]
    expected = document_numbers([n for n in lengths if n], total)
    assert np.array_equal(document_numbers(shape.resized(total), total), expected)
    other = ls.masks.per_row(documents & ls.masks.causal(), ls.masks.causal(total)).resized(total)
    assert np.array_equal(document_numbers(other, total), np.stack((expected[0], np.zeros_like(expected[0]))))


IDS = torch.arange(8).view(1, 8)


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        ({"input_ids": IDS, "attention_mask": IDS}, {}, "take this out of the batch"),
        ({"input_ids": IDS, "extra": IDS[0]}, {}, "dims={'extra': 0}"),
        ({"input_ids": IDS}, {"dims": {"extra": 0}}, "not in the batch"),
        ({"input_ids": IDS}, {"dims": {"input_ids": 0}}, "known by name"),
        ({"input_ids": IDS, "x": IDS}, {"dims": {"x": None}, "fills": {"x": 1}}, "Add it to dims"),
        ({"x": [1]}, {"dims": {"x": 0}}, "not a tensor but list"),
        ({"input_ids": IDS[:, :4]}, {}, "Pass whole tensors, not shards"),
        ({"input_ids": IDS.tolist()}, {}, "Collate the batch first"),
        ({"input_ids": IDS.expand(2, 8), "labels": IDS.expand(3, 8)}, {}, "must have one shape"),
        ({"labels": IDS, "shift_labels": IDS}, {}, "not both"),
        ({"input_ids": IDS, "loss_mask": IDS > 3}, {}, "without labels"),
        ({"labels": IDS, "loss_mask": IDS}, {}, "0 and 1 only"),
        ({"labels": IDS}, {"num_shifts": 0}, "num_shifts must be"),
        ({"labels": IDS}, {"documents": [3, 5]}, "Pass positions='document'"),
        ({"x": IDS}, {"documents": [3, 5], "dims": {"x": 1}}, "Pass positions='document'"),
        ({"labels": IDS, "position_ids": IDS}, {"positions": "sequence"}, "Take one of them out"),
        ({"labels": IDS}, {"positions": "rotary"}, "positions must be"),
        ({"labels": IDS}, {"documents": [3, 4], "positions": "document"}, "add up to 7"),
        ({"labels": IDS}, {"documents": [[8], [4, 4]], "positions": "document"}, "got 2 lists for"),
        (
            {"labels": IDS},
            {"documents": ls.masks.from_mask_mod(lambda b, h, q, k: q >= k, 8), "positions": "document"},
            "Pass the lengths",
        ),
    ],
)
def test_batches_that_could_mean_two_things_are_refused(batch, options, said):
    with pytest.raises(BatchError) as found:
        shard_batch(batch, ls.layouts.zigzag(8, 2), 0, **options)
    assert said in str(found.value)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_the_loss_of_one_process_is_cross_entropy():
    logits, labels = torch.randn(2, 5, 7, requires_grad=True), torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    loss = token_loss(logits, labels, group=None, gradients="average")
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert torch.allclose(loss, expected)
    assert torch.allclose(*(torch.autograd.grad(one, logits)[0] for one in (loss, expected)))
    narrow = token_loss(logits.bfloat16(), labels, group=None, gradients="sum")
    assert narrow.dtype == torch.float32
    narrow.backward()
    total = token_loss(logits, labels, group=None, gradients="sum", reduction="sum")
    half = token_loss(logits, labels, group=None, gradients="sum", num_tokens=0.5)  # a count that was scaled
    assert torch.allclose(half, 2 * total)
    nothing = token_loss(logits, torch.full_like(labels, -100), group=None, gradients="sum", num_tokens=0)
    assert nothing.item() == 0.0
    assert torch.equal(torch.autograd.grad(nothing, logits)[0], torch.zeros_like(logits))


@pytest.mark.parametrize("head", [None, torch.randn(7, 5, dtype=torch.float64)])
@pytest.mark.parametrize("count", [torch.tensor(9), torch.tensor([9]), torch.tensor([9.0]), torch.tensor([[9.0]])])
def test_counts_of_any_shape_divide_without_rounding(count, head):
    """`n = torch.tensor([k]); all_reduce(n)` is a count, too."""
    values, labels = torch.randn(11, 5, dtype=torch.float64, requires_grad=True), torch.randint(0, 5, (11,))
    loss = token_loss(values, labels, group=None, gradients="sum", num_tokens=count, head=head)
    logits = values if head is None else values @ head.T
    expected = F.cross_entropy(logits, labels, reduction="sum") / 9
    for found, wanted in zip(
        (loss, *torch.autograd.grad(loss, values)), (expected, *torch.autograd.grad(expected, values)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gradients": "mean"}, "FSDP and DDP do that"),
        ({"reduction": "none"}, "cross_entropy"),
        ({"reduction": "sum", "num_tokens": 3}, "Leave one of them out"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "already shifted"),
        ({"group": 3}, "torch.distributed.group.WORLD"),
    ],
)
def test_losses_that_do_not_fit_are_refused(change, said):
    given = {"labels": torch.zeros(4, dtype=torch.int64), "group": None, "gradients": "sum"} | change
    with pytest.raises(BatchError) as found:
        token_loss(torch.zeros(4, 5), **given)
    assert said in str(found.value)


@pytest.mark.share(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "count"), [(2, 48), (4, 24)])
def test_losses_and_gradients_do_not_depend_on_ranks(world, count):
    found = pool(world).run(training_work.losses, list(range(count)), world, timeout=WAIT)
    for seed, ranks in enumerate(zip(*found, strict=True)):
        assert max(loss for loss, _, _, _ in ranks) <= 1e-12, f"loss, seed {seed}"
        assert max(gradient for _, gradient, _, _ in ranks) <= 1e-12, f"gradients, seed {seed}"
        assert len({value for _, _, _, value in ranks}) == 1, f"ranks log different losses, seed {seed}"
    counts = [[labels for _, _, labels, _ in ranks] for ranks in zip(*found, strict=True)]
    assert any(min(labels) == 0 < max(labels) for labels in counts)
    assert any(max(labels) == 0 for labels in counts)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["sum", "ddp"])
def test_trainers_over_samples_and_sequences_reduce_to_one_process(how):
    for error, said, _ in pool(4).run(training_work.trainer, how, timeout=WAIT):
        assert error <= 1e-12
        assert "'input_ids' on ranks [2, 3] is not what rank 0 has" in said


@pytest.mark.timeout(240)
def test_micro_batches_add_up_to_one_batch():
    for error, other in pool(2).run(training_work.accumulated, timeout=WAIT):
        assert error <= 1e-15
        assert other <= 1e-13


# -- rows and agreement ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_rows_move_between_layouts_and_back(world):
    assert pool(world).run(training_work.relayouts, list(range(64)), world, timeout=WAIT) == [64] * world


def test_only_rows_whose_owner_changes_move():
    assert pool(2).run(training_work.moved_bytes, timeout=WAIT) == [[4], [4]]
    plan = moves(ls.layouts.zigzag(16, 2), ls.layouts.contiguous(16, 2), 0)
    assert (plan.num_sent, plan.num_received) == ([0, 4], [0, 4])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_different_batches_are_refused_with_keys_and_ranks(world):
    found = pool(world).run(training_work.differing, timeout=WAIT)
    for name in found[0].keys() - {"object"}:
        assert len({messages[name] for messages in found}) == 1, f"ranks say different things about {name}"
    last, said = world - 1, found[0]
    assert f"but 'input_ids' on ranks [{last}] is not what rank 0 has. Make" in said["values"]
    assert f"but 'extra' is missing on ranks [{last}]. Make" in said["keys"]
    for name, key in (("shape", "x"), ("dtype", "x"), ("long", "k" * 64)):
        assert f"but '{key}' on ranks [{last}] is not" in said[name]
    assert f"on ranks [{last}] the batch has values of other types. Leave" in said["object"]
    assert "'x' (object)" in found[last]["object"]


@pytest.mark.timeout(240)
def test_calls_that_do_not_fit_their_group_are_refused():
    for said in pool(2).run(training_work.refusals, timeout=WAIT):
        assert "a mesh of 3 ranks, but there are 2" in said["mesh"]
        assert "mesh['cp']" in said["axes"]
        assert "torch.no_grad()" in said["grad"]
        assert "Pass the dim of the tokens" in said["slots"]
        assert "one sequence on the same ranks" in said["size"]
        assert "a group of 2 ranks" in said["group"]
        assert "must be a rank in [0, 2)" in said["to"]
        assert "got NoneType" in said["none"]


# -- the example -------------------------------------------------------------------------------------------------------


def one_process_losses(example):
    """The example's model trained by PyTorch alone: no shards, dense mask, its own cross-entropy."""
    torch.manual_seed(0)
    model = example.Model(F.scaled_dot_product_attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(example.STEPS):
        lengths, batch = example.packed_batch(step)
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        dense = (document[:, None] == document).tril()
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        logits = model(batch["input_ids"], positions, dense)
        inside = document[1:] == document[:-1]
        loss = F.cross_entropy(logits[0, :-1][inside], batch["labels"][0, 1:][inside])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@pytest.mark.nightly  # README's program always
@pytest.mark.timeout(240)
def test_the_fsdp2_example_learns_as_one_process_does(tmp_path):
    path = ROOT / "examples" / "fsdp2.py"
    assert len(path.read_text().splitlines()) < 60
    done = torchrun(["--nproc-per-node", "2", str(path)], tmp_path, timeout=220)
    assert done.status == 0, done.report()
    spec = importlib.util.spec_from_file_location("fsdp2_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    expected = list(one_process_losses(example))
    for rank in range(2):
        found = [float(loss) for loss in re.findall(rf"rank {rank} step \d+ loss (\d+\.\d{{6}})", done.out)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert expected[-1] < 0.5 * expected[0]


@pytest.mark.parametrize("lengths", [[9], [4, 6], [1, 3, 2, 5]])
def test_shift_labels_are_used_as_given(lengths):
    """Documents shifted one by one, x = document[:-1] and y = document[1:]: each keeps its end of text."""
    documents = [10 * number + torch.arange(length + 1) for number, length in enumerate(lengths)]
    x, y = (torch.cat([document[part] for document in documents])[None] for part in (slice(-1), slice(1, None)))
    layout = ls.layouts.zigzag(sum(lengths), 2)
    parts = [
        shard_batch({"input_ids": x, "shift_labels": y}, layout, rank, documents=lengths, positions="document",
                    num_shifts=2)
        for rank in range(2)
    ]  # fmt: skip
    assert torch.equal(layout.unshard([part["shift_labels"] for part in parts], 1), y)
    two_later = torch.cat([torch.nn.functional.pad(document[2:], (0, 1), value=-100) for document in documents])[None]
    assert torch.equal(layout.unshard([part["shift_labels_2"] for part in parts], 1), two_later)


def test_a_default_device_does_not_matter():
    """Sharding follows the tensors, also inside of `with torch.device("meta")`, where models are made."""
    batch = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    layout = ls.layouts.zigzag(16, 2)
    plain = shard_batch(batch, layout, 1, documents=[9, 7], positions="document")
    with torch.device("meta"):
        found = shard_batch(batch, layout, 1, documents=[9, 7], positions="document")
        whole = layout.unshard([layout.shard(batch["input_ids"], rank) for rank in range(2)])
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert torch.equal(whole, batch["input_ids"])


def test_a_mesh_is_on_cpus_where_there_is_no_gpu():
    """Also with a PyTorch for CUDA, which is what `pip install torch` brings."""
    assert pool(2).run(training_work.device_of_mesh) == ["cpu", "cpu"]


@pytest.mark.timeout(180)
def test_plans_that_workers_of_a_loader_made(tmp_path):
    script = Path(__file__).parent / "loader_script.py"
    done = torchrun(["--nproc-per-node", "2", str(script)], tmp_path, timeout=150)
    assert done.status == 0, done.report()
    assert done.out.count("rank 0 batch") == done.out.count("rank 1 batch") == 30
    assert re.search(r"batch \d*[6-9] (all_to_all|hybrid)", done.out), "auto must choose a scheme that cuts heads"
