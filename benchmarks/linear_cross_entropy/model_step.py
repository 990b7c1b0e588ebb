"""A training step of a compiled Llama: backend="dcs" beside TorchInductor as it is, and beside `fused_loss` under it.

    # On a GPU: 1.2 billion parameters, 8192, 32768 and 65536 tokens.
    PYTHONPATH=benchmarks python -m linear_cross_entropy.model_step --batches 4 16 32 --checkpoint --output result.json

The model is transformers' LlamaForCausalLM in the shape of Llama 3.2 1B with random weights, bfloat16, tied embeddings;
the compiled function returns the loss alone, so that the logits need not leave it. A step is forward, backward and a
fused AdamW. The head's share is what linear_cross_entropy takes alone.

Every number of tokens and way to compile is a process: they compile at the same time, half a minute or more each, and
then have the GPU one after another; those that wait hold no weights there. Beside each step's time stands that of a
bare product in the same process, as a GPU's clock may drift from one to the next. What does not fit into memory, and
what is not reached before `--limit` or a SIGTERM, is a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness import environment, reason_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import torch_dcs_ops
from torch_dcs_ops.integrations.transformers import fused_loss

STEPS = ("inductor", "dcs", "fused_loss")
MIB = 2**20
LEAST_STEPS = 3


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


def milliseconds(function: Callable[[], object], count: int, seconds: float) -> list[float]:
    """Of up to `count` calls that take no more than `seconds`, of LEAST_STEPS in any case."""
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < count and (len(found) < LEAST_STEPS or time.monotonic() < end):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last))
    return found


@contextlib.contextmanager
def on_the_host(model: Any) -> Iterator[None]:
    """Its weights, whose memory on the GPU is for others meanwhile; the tensors stay the same."""
    held = [(p.data, p.data.to("cpu", copy=True)) for p in model.parameters()]
    sizes = [data.untyped_storage().nbytes() for data, _ in held]
    for data, _ in held:
        data.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    yield
    for (data, values), size in zip(held, sizes, strict=True):
        data.untyped_storage().resize_(size)
        data.copy_(values)


class Turn:
    """A process's right to the GPU: when all smaller batches are done, one at a time.

    The one that started the processes gives it back, when its holder is gone and its memory with it.
    """

    def __init__(self, gate: Any, lock: Any, holder: Any) -> None:
        self.gate, self.lock, self.holder = gate, lock, holder

    def take(self) -> None:
        if self.holder.value != os.getpid():
            self.gate.wait()
            self.lock.acquire()
            self.holder.value = os.getpid()


def measure(name: str, batch: int, options: argparse.Namespace, turn: Turn) -> dict[str, Any]:
    """Compiles, waits for the GPU, and measures with that to itself."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = llama(options.layers, device)
    if name == "fused_loss":
        fused_loss(model)
    model.train()
    if options.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compile_graph = torch._dynamo.lookup_backend("dcs" if name == "dcs" else "inductor")

    def compile_and_wait(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled = compile_graph(graph, inputs)
        with on_the_host(model):
            turn.take()
        return compiled

    loss = torch.compile(loss_of(model), backend=compile_and_wait, fullgraph=True, dynamic=False)
    tokens = torch.randint(model.config.vocab_size, (batch, options.length), device=device)

    def step() -> Tensor:
        value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    start = time.perf_counter()
    step()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    last_loss = float(step())
    peak = torch.cuda.max_memory_allocated()
    factors = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    times = milliseconds(step, options.steps, options.seconds)
    products = milliseconds(lambda: factors[0] @ factors[1], 20, options.seconds)
    record = {
        "step_ms": statistics.median(times),
        "steps": len(times),
        "product_ms": statistics.median(products),
        "peak_mib": peak / MIB,
        "peak_beyond_model_and_optimizer_mib": (peak - before) / MIB,
        "seconds_until_measured": first,
        "loss": last_loss,
    }
    if name == "dcs":
        hidden = torch.randn(*tokens.shape, model.config.hidden_size, dtype=torch.bfloat16, device=device)
        hidden.requires_grad_()
        weight = model.lm_head.weight

        def head() -> None:
            value = torch_dcs_ops.linear_cross_entropy(hidden, weight, tokens, shift=True)
            torch.autograd.grad(value, (hidden, weight))

        record["head_alone_ms"] = statistics.median(milliseconds(head, 10, options.seconds))
    return record


def work(name: str, batch: int, options: argparse.Namespace, turn: Turn, results: Any) -> None:
    """What a process does."""
    try:
        found = measure(name, batch, options, turn)
    except torch.OutOfMemoryError as error:
        found = {"does not fit": reason_of(error)}
    except Exception as error:
        found = {"failed": reason_of(error)}
    results.put((name, batch, found))


def ratios(records: dict[str, Any]) -> dict[str, float]:
    """What is asked of `dcs`, of the steps of one number of tokens."""
    found: dict[str, float] = {}
    extra = "peak_beyond_model_and_optimizer_mib"
    ours = records.get("dcs", {})
    if "step_ms" not in ours:
        return found
    found["head_share"] = ours["head_alone_ms"] / ours["step_ms"]
    for name in ("inductor", "fused_loss"):
        if "step_ms" in records.get(name, {}):
            found[f"time_over_{name}"] = ours["step_ms"] / records[name]["step_ms"]
            found[f"extra_memory_over_{name}"] = ours[extra] / records[name][extra]
    return found


Waiting = dict[tuple[str, int], Any]


def next_found(waiting: Waiting, results: Any) -> tuple[str, int, dict[str, Any]] | None:
    """What a process has found, or that it is gone without a word; None: nothing yet."""
    with contextlib.suppress(queue.Empty):
        found: tuple[str, int, dict[str, Any]] = results.get(timeout=1)
        return found
    for (name, batch), process in waiting.items():
        if process.exitcode is not None and results.empty():
            return name, batch, {"failed": f"the process ended with {process.exitcode}"}
    return None


def run(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    lock, results, holder = context.Semaphore(1), context.Queue(), context.Value("i", 0)
    gates = {batch: context.Event() for batch in options.batches}
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    waiting: Waiting = {}
    for batch, gate in gates.items():
        for name in STEPS:
            arguments = name, batch, options, Turn(gate, lock, holder), results
            waiting[name, batch] = context.Process(target=work, args=arguments, daemon=True)
    for process in waiting.values():
        process.start()
    result: dict[str, Any] = {
        "environment": environment(options.commit),
        "model": {"layers": options.layers, "length": options.length, "checkpoint": options.checkpoint},
        "batches": {str(batch): {"steps": {}} for batch in options.batches},
    }
    end = time.monotonic() + options.limit
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while waiting and time.monotonic() < end and not stopped:
        gates[min(batch for _, batch in waiting)].set()
        one = next_found(waiting, results)
        if one is None:
            continue
        name, batch, found = one
        process = waiting.pop((name, batch))
        process.join()
        if holder.value == process.pid:
            holder.value = 0
            lock.release()
        of_batch = result["batches"][str(batch)]
        of_batch["steps"][name] = found
        of_batch.update(ratios(of_batch["steps"]))
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
        print(batch * options.length, "tokens", name, shown, flush=True)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    for (name, batch), process in waiting.items():
        process.kill()
        print(batch * options.length, "tokens", name, "not reached in the time", flush=True)
    for batch, of_batch in result["batches"].items():
        print(int(batch) * options.length, "tokens", {k: round(v, 4) for k, v in of_batch.items() if k != "steps"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[4], help="of so many sequences each")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--checkpoint", action="store_true", help="layers compute their activations again")
    parser.add_argument("--steps", type=int, default=20, help="at the most")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps that are timed; three in any case")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--commit", help="the commit measured, where it is not the checkout's")
    parser.add_argument("--output", type=Path)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
