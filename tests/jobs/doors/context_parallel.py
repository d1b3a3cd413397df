"""What README's lines for PyTorch's `context_parallel` take as given, and a check of what they compute."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 128, 16)
whole = [x.clone() for x in (q, k, v)]

# README's block

from longspan.torch_api import context_parallel_unshard  # noqa: E402

(out,) = context_parallel_unshard(mesh, [out], [2])  # noqa: F821
error = (out - scaled_dot_product_attention(*whole, is_causal=True)).abs().max().item()
assert out.shape == whole[0].shape
assert error < 1e-5, error
print(f"rank {rank}: off by {error:.1e}")
dist.destroy_process_group()
