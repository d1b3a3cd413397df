"""Replace PyTorch's context parallelism by changing the import: torchrun --nproc-per-node 2 examples/migration.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

import longspan as ls

# from torch.distributed.tensor.experimental import context_parallel
from longspan.torch_api import context_parallel

SEQ_LEN, HEADS, DIM = 121, 4, 16  # any length


def attend(x, weight, **options):
    q, k, v = (x @ weight).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, **options)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    x = torch.randn(1, SEQ_LEN, HEADS * DIM)
    weight = (torch.randn(HEADS * DIM, 3 * HEADS * DIM) * 0.1).requires_grad_()

    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):  # x is a shard inside
        attend(x, weight, is_causal=True).square().sum().backward()
    dist.all_reduce(weight.grad)
    causal, weight.grad = weight.grad, None

    packed = ls.masks.documents([70, 51]) & ls.masks.causal()  # not supported by PyTorch's own
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], mask=packed):
        attend(x, weight).square().sum().backward()
    dist.all_reduce(weight.grad)
    documents, weight.grad = weight.grad, None

    attend(x, weight, is_causal=True).square().sum().backward()  # x is whole again
    error = ((causal - weight.grad).norm() / weight.grad.norm()).item()
    weight.grad = None
    allowed = torch.as_tensor(packed.allows(torch.arange(SEQ_LEN)[:, None].numpy(), torch.arange(SEQ_LEN).numpy()))
    attend(x, weight, attn_mask=allowed).square().sum().backward()
    error = max(error, ((documents - weight.grad).norm() / weight.grad.norm()).item())
    print(f"rank {dist.get_rank()}: gradients against one process {error:.1e}")
    dist.destroy_process_group()
