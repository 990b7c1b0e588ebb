"""A training step of a compiled Llama: backend="dcs" beside TorchInductor as it is, and beside `fused_loss` under it.

    # On a GPU: 1.2 billion parameters, 8192 and 32768 tokens.
    PYTHONPATH=benchmarks python -m linear_cross_entropy.model_step --batches 4 16 --output result.json

The model is transformers' LlamaForCausalLM in the shape of Llama 3.2 1B with random weights, bfloat16, tied embeddings;
the compiled function returns the loss alone, so that the logits need not leave it. The steps run in random order; a
step is forward, backward and a fused AdamW. The head's share is what linear_cross_entropy takes alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import environment
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import torch_dcs_ops
from torch_dcs_ops.integrations.transformers import fused_loss

STEPS = ("inductor", "dcs", "fused_loss")
MIB = 2**20


def llama(layers: int, device: torch.device) -> Any:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, rope_theta=500000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    with device:
        return LlamaForCausalLM(config).to(torch.bfloat16)


def loss_of(model: Any) -> Callable[[Tensor], Tensor]:
    def loss(tokens: Tensor) -> Tensor:
        value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    return loss


class Step:
    """A training step, and what its compilation and its memory were."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, backend: str, tokens: Callable[[], Tensor]
    ) -> None:
        self.model, self.optimizer, self.tokens = model, optimizer, tokens
        self.loss = torch.compile(loss_of(model), backend=backend, fullgraph=True, dynamic=False)
        start = time.perf_counter()
        self()
        torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - start
        self.times: list[float] = []

    def __call__(self) -> float:
        loss = self.loss(self.tokens())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def measure_memory(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.last_loss = self()
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()
        self.extra = self.peak - before

    def measure_time(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tokens = self.tokens()
        start.record()
        self.loss(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end))

    def record(self) -> dict[str, float]:
        return {
            "step_ms": statistics.median(self.times),
            "peak_mib": self.peak / MIB,
            "peak_beyond_model_and_optimizer_mib": self.extra / MIB,
            "first_step_seconds_with_compilation": self.compile_seconds,
            "loss": self.last_loss,
        }


def head_alone(model: Any, tokens: Tensor, repetitions: int) -> float:
    hidden = torch.randn(
        *tokens.shape, model.config.hidden_size, dtype=torch.bfloat16, device=tokens.device, requires_grad=True
    )
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch_dcs_ops.linear_cross_entropy(hidden, model.lm_head.weight, tokens, shift=True).backward()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        model.zero_grad()
    return statistics.median(times)


def compare(model: Any, fused: Any, optimizers: tuple[Any, Any], tokens: Callable[[], Tensor], count: int) -> Any:
    """The steps at one number of tokens; `fused` is the model whose loss is fused."""
    torch._dynamo.reset()
    steps = {}
    for name in STEPS:
        is_fused = name == "fused_loss"
        with torch._inductor.utils.fresh_cache():
            steps[name] = Step(
                fused if is_fused else model, optimizers[is_fused], "inductor" if is_fused else name, tokens
            )
    for step in steps.values():
        step()
        step.measure_memory()
    order = list(steps.values())
    shuffle = random.Random(0)
    for _ in range(count):
        shuffle.shuffle(order)  # near its power limit, a GPU's speed depends on what ran before
        for step in order:
            step.measure_time()
    records = {name: step.record() for name, step in steps.items()}
    ours, head = records["dcs"], head_alone(model, tokens(), count)
    return {
        "steps": records,
        "head_alone_ms": head,
        "head_share": head / ours["step_ms"],
        "time_over_inductor": ours["step_ms"] / records["inductor"]["step_ms"],
        "extra_memory_over_inductor": ours["peak_beyond_model_and_optimizer_mib"]
        / records["inductor"]["peak_beyond_model_and_optimizer_mib"],
        "extra_memory_over_fused_loss": ours["peak_beyond_model_and_optimizer_mib"]
        / records["fused_loss"]["peak_beyond_model_and_optimizer_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[4], help="of so many sequences each")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--checkpoint", action="store_true", help="layers compute their activations again")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where it is not the checkout's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    model, fused = (llama(options.layers, device) for _ in range(2))
    fused_loss(fused)
    for each in (model, fused):
        each.train()
        if options.checkpoint:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizers = tuple(torch.optim.AdamW(each.parameters(), lr=1e-5, fused=True) for each in (model, fused))
    warm = torch.compile(torch.nn.Linear(8, 8, device=device))  # what the first compilation of a process loads
    warm(torch.randn(8, 8, device=device)).sum().backward()
    result: dict[str, Any] = {
        "environment": environment(options.commit),
        "model": {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "config": model.config.to_dict(),
            "length": options.length,
            "checkpoint": options.checkpoint,
        },
        "batches": {},
    }
    for batch in options.batches:

        def tokens(batch: int = batch) -> Tensor:
            return torch.randint(model.config.vocab_size, (batch, options.length), device=device)

        found = compare(model, fused, optimizers, tokens, options.steps)
        result["batches"][batch] = found
        for name, record in found["steps"].items():
            print(batch, name, {key: round(value, 3) for key, value in record.items()})
        print(batch, {key: round(value, 4) for key, value in found.items() if key != "steps"}, flush=True)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
