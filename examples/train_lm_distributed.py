"""A language model under FSDP2 and tensor parallelism, its losses beside those of one process.

    torchrun --nproc-per-node 4 examples/train_lm_distributed.py [--tensor-parallel 2] [--compile]

The ranks are a mesh of data- and tensor-parallel ones. Over the latter the layers are cut as `parallelize_module` does,
the hidden states between them by time (sequence parallelism), and the vocabulary: the head's weight is a DTensor of
Shard(0), and `linear_cross_entropy` takes it as it is, without the logits of any row anywhere. Over the former
`fully_shard` cuts what is left. Half-way the model and the optimizer are written to a checkpoint and read back into new
ones.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from torch_dcs_ops import linear_cross_entropy

VOCABULARY = 257  # bytes, and one behind them: no number of ranks divides it
TOLERANCE = 1e-6  # of losses in float64, whose steps amplify what sums in another order are off by


@dataclass
class Options:
    steps: int = 6
    tensor_parallel: int = 2
    rows: int = 4  # of a batch, over all ranks
    length: int = 16
    width: int = 32
    heads: int = 4
    layers: int = 2
    compile: bool = False


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        normed = self.attention_norm(x)
        # As many heads as the columns that this rank has of the three.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; `targets` (B, T) are shifted already, as time is cut below."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x, weight = self.norm(x), self.head.weight
        if not isinstance(weight, DTensor):  # in one process
            return linear_cross_entropy(x, weight, targets)
        # The head is not called: its weight is what fully_shard has gathered, Shard(0) over the tensor-parallel ranks.
        mesh = weight.device_mesh
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        cut = DTensor.from_local(targets, mesh, [Replicate()], run_check=False).redistribute(mesh, x.placements)
        return linear_cross_entropy(x, weight, cut).full_tensor()


def parallelized(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Cut over the ranks of `mesh`, ("dp", "tp")."""
    rows: dict[str, Any] = {"input_layouts": Shard(1)}
    plan: dict[str, Any] = {
        # By features: torch 2.13 cannot compile one that is cut by classes a second time.
        "embedding": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(use_local_output=False),
    }
    for layer in range(len(model.blocks)):
        of_block = f"blocks.{layer}"
        plan |= {f"{of_block}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        plan |= {f"{of_block}.{name}": ColwiseParallel(**rows) for name in ("query", "key", "value", "up")}
        plan |= {
            f"{of_block}.{name}": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            for name in ("output", "down")
        }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def batches(options: Options) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) of this file's bytes; the target of a step is the token behind it."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    size = options.rows * options.length
    starts = range(0, options.steps * size, size)
    shape = (options.rows, options.length)
    return [
        (text[start : start + size].view(shape), text[start + 1 : start + 1 + size].view(shape)) for start in starts
    ]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: list[tuple[Tensor, Tensor]], device: str, compiles: bool
) -> list[Tensor]:
    run, losses = torch.compile(model) if compiles else model, []
    for tokens, targets in given:
        loss = run(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def made(options: Options, device: str, mesh: DeviceMesh | None, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = LanguageModel(options).to(device)
    if mesh is not None:
        model = parallelized(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def run(options: Options, device: str, folder: str) -> tuple[list[float], list[float]]:
    """(losses of one process, of all ranks), in a process group that has been initialized; checkpoints to `folder`."""
    tp = options.tensor_parallel
    mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, replicas = mesh.get_local_rank("dp"), mesh.size(0)
    every, half = batches(options), options.steps // 2
    expected = trained(*made(options, device, None), every, device, compiles=False)
    own = slice(dp * options.rows // replicas, (dp + 1) * options.rows // replicas)
    mine = [(tokens[own], targets[own]) for tokens, targets in every]

    model, optimizer = made(options, device, mesh)
    losses = trained(model, optimizer, mine[:half], device, options.compile)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    # Another seed: all that it knows comes from the checkpoint.
    model, optimizer = made(options, device, mesh, seed=1)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    read = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    losses += trained(model, optimizer, mine[half:], device, options.compile)

    # Every data-parallel rank has as many tokens: the mean of their means is the mean.
    total = torch.stack(losses)
    dist.all_reduce(total, group=mesh.get_group("dp"))
    return torch.stack(expected).tolist(), (total / replicas).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--tensor-parallel", type=int, default=Options.tensor_parallel)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", help="folder; default: one that is deleted")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    # A graph's names of groups are another rank's, or another run's, in what torch 2.13 finds in its cache.
    torch.compiler.config.force_disable_caches = True
    torch.set_default_dtype(torch.float64)  # so that nothing but the order of sums differs
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=2))
    options = Options(steps=given.steps, tensor_parallel=given.tensor_parallel, compile=given.compile)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [given.checkpoint or temporary]
        dist.broadcast_object_list(folders, src=0)
        expected, found = run(options, device, folders[0])
        dist.barrier()  # the folder is rank 0's
    error = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size() // options.tensor_parallel} x {options.tensor_parallel} ranks")
        print("loss of one process ", *(f"{loss:.4f}" for loss in expected))
        print("loss of all ranks   ", *(f"{loss:.4f}" for loss in found))
        print(f"off by {error:.1e}")
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()  # all ranks end their groups at about the same time
    dist.destroy_process_group()
    sys.exit(error > TOLERANCE)


if __name__ == "__main__":
    main()
