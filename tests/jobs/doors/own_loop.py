"""What README's lines for one's own loop take as given, and a check of what they compute."""

import torch
import torch.distributed as dist

import longspan as ls  # noqa: F401

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD
torch.manual_seed(0)
ids = torch.randint(100, (1, 2048))
batch = {"input_ids": ids, "labels": ids}
embed, weight = torch.randn(100, 64), torch.randn(64, 12 * 64) / 8


def project(ids, positions):
    x = embed[ids] + positions[..., None] / 1000
    return (x @ weight).unflatten(-1, (12, 64)).transpose(1, 2).split((8, 2, 2), dim=1)


# README's block

mask = mask.allows(torch.arange(2048)[:, None].numpy(), torch.arange(2048).numpy())  # noqa: F821
whole = project(ids, torch.cat([torch.arange(length) for length in (700, 1200, 148)])[None])
right = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=torch.as_tensor(mask), enable_gqa=True)
error = (out - layout.shard(right, rank, dim=2)).abs().max().item()  # noqa: F821
assert error < 1e-4, error
labels = torch.cat([torch.cat((part[1:], torch.tensor([-100]))) for part in ids[0].split([700, 1200, 148])])
assert torch.equal(mine["shift_labels"][0], layout.shard(labels, rank))  # noqa: F821
print(f"rank {rank}: off by {error:.1e}")
dist.destroy_process_group()
