"""A training step of a compiled Llama with backend="dcs" beside one with TorchInductor as it is.

    # On a GPU: 1.2 billion parameters, 8192 tokens.
    PYTHONPATH=benchmarks python -m linear_cross_entropy.model_step --output result.json

The model is transformers' LlamaForCausalLM in the shape of Llama 3.2 1B with random weights, bfloat16, tied embeddings;
the compiled function returns the loss alone, so that the logits need not leave it. Both steps run on the same model, in
random order; a step is forward, backward and a fused AdamW. The head's share is what linear_cross_entropy takes alone.
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

BACKENDS = ("inductor", "dcs")
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
        self.loss = torch.compile(loss_of(model), backend=backend, fullgraph=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--commit", help="the commit measured, where it is not the checkout's")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    shuffle = random.Random(0)
    device = torch.device("cuda")
    model = llama(options.layers, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def tokens() -> Tensor:
        return torch.randint(model.config.vocab_size, (options.batch, options.length), device=device)

    warm = torch.compile(torch.nn.Linear(8, 8, device=device))  # what the first compilation of a process loads
    warm(torch.randn(8, 8, device=device)).sum().backward()
    steps = {}
    for backend in BACKENDS:
        with torch._inductor.utils.fresh_cache():
            steps[backend] = Step(model, optimizer, backend, tokens)
    for step in steps.values():
        step()
        step.measure_memory()
    order = list(steps.values())
    for _ in range(options.steps):
        shuffle.shuffle(order)  # near its power limit, a GPU's speed depends on what ran before
        for step in order:
            step.measure_time()
    records = {name: step.record() for name, step in steps.items()}
    head = head_alone(model, tokens(), options.steps)
    plain, ours = records["inductor"], records["dcs"]
    result = {
        "environment": environment(options.commit),
        "model": {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "config": model.config.to_dict(),
            "batch": options.batch,
            "length": options.length,
        },
        "steps": records,
        "head_alone_ms": head,
        "head_share": head / ours["step_ms"],
        "time_ratio": ours["step_ms"] / plain["step_ms"],
        "peak_ratio": ours["peak_mib"] / plain["peak_mib"],
    }
    for name, record in records.items():
        print(name, {key: round(value, 3) for key, value in record.items()})
    print({key: round(result[key], 4) for key in ("head_alone_ms", "head_share", "time_ratio", "peak_ratio")})
    if options.output:
        options.output.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
