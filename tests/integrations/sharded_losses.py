"""Two processes on gloo: fused_loss under DistributedDataParallel and FSDP2, against the model in one process.

python sharded_losses.py    # exits with 1 where a loss or a gradient differs
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from torch_dcs_ops.integrations.transformers import fused_loss

SMALL = {
    "vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


def build() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)).train()


def batch(rank: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def of_one_process(world: int) -> tuple[list[float], dict[str, Tensor]]:
    model = build()
    losses = [model(**batch(rank)).loss for rank in range(world)]
    (sum(losses) / world).backward()  # type: ignore[union-attr]
    return [float(loss.detach()) for loss in losses], {name: p.grad for name, p in model.named_parameters()}  # type: ignore[misc]


def sharded(model: Any, head_alone: bool) -> Any:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head_alone:
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ddp(model: Any, fuse_last: bool) -> Any:
    if not fuse_last:
        fused_loss(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    if fuse_last:
        fused_loss(wrapped)
    return wrapped


def fsdp(model: Any, fuse_last: bool, head_alone: bool) -> Any:
    if not fuse_last:
        fused_loss(model)
    sharded(model, head_alone)
    if fuse_last:
        fused_loss(model)
    return model


def check(name: str, make: Callable[[], Any], rank: int, world: int) -> None:
    losses, gradients = of_one_process(world)
    model = make()
    for _ in range(2):  # the second call finds what the first one left
        model.zero_grad()
        output = model(**batch(rank))
        assert output.logits is None, name
        torch.testing.assert_close(float(output.loss.detach()), losses[rank], rtol=1e-6, atol=0)
        output.loss.backward()
        for key, parameter in model.named_parameters():
            wanted = gradients[key.removeprefix("module.")]
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            worst = float((gradient - wanted).abs().max() / wanted.abs().max())
            assert worst < 4e-6, f"{name}: {key}'s gradient is off by {worst:.1e}"
    if rank == 0:
        print(f"{name}: as in one process")


def work(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for last in (False, True):
        order = "fused after" if last else "fused before"
        check(f"DDP, {order}", lambda last=last: ddp(build(), last), rank, world)  # type: ignore[misc]
    for last, alone in itertools.product((False, True), repeat=2):
        name = f"FSDP2, {'fused after' if last else 'fused before'}, {'a head of its own' if alone else 'whole'}"
        check(name, lambda last=last, alone=alone: fsdp(build(), last, alone), rank, world)  # type: ignore[misc]
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (2, int(sys.argv[1])), nprocs=2)
