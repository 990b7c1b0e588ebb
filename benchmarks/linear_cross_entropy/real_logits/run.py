"""dcs::linear_cross_entropy on the logits of a language model, which benchmarks on random numbers know nothing about.

    RUN="env PYTHONPATH=benchmarks python -m linear_cross_entropy.real_logits.run"
    $RUN prepare --tokens build/tokens.npz                  # some minutes of CPU time
    $RUN train --tokens build/tokens.npz --model build/model.pt --seconds 100
    $RUN measure --model build/model.pt --output result.json --peers
    $RUN converge --tokens build/tokens.npz --output converge.json

`prepare` makes tokens of the Python sources on this machine (tokens.py), `train` a small model of them
(model.py), `measure` the errors, times and memory of filtered gradients on its hidden states and head
(measure.py), and `converge` trains with exact and with filtered gradients (converge.py).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import environment, report

FILTERS = (2**-8, 2**-10, 2**-12)  # a smaller one is exact at 128256 tokens


def prepare(options: argparse.Namespace) -> None:
    from linear_cross_entropy.real_logits import tokens as real_tokens

    folders = options.sources or real_tokens.default_folders()
    real_tokens.prepare(
        options.tokens, folders, vocabulary=options.vocabulary, megabytes=options.megabytes, seed=options.seed
    )


def train(options: argparse.Namespace) -> None:
    from linear_cross_entropy.real_logits import model as real_model
    from linear_cross_entropy.real_logits.tokens import Tokens

    shape = real_model.Shape(options.width, options.layers, options.heads, options.features, options.length)
    schedule = real_model.Schedule(
        options.seconds, options.narrow, options.sequences, options.learning_rate, options.compile
    )
    tokens = Tokens.load(options.tokens)
    device = _device(options)
    snapshot = real_model.train(tokens, shape, schedule, seed=options.seed, rows=options.rows, device=device)
    snapshot.save(options.model)
    print(json.dumps(snapshot.record, indent=1))
    print(f"written: {options.model}")


def measure(options: argparse.Namespace) -> None:
    from linear_cross_entropy.real_logits import measure as real_measure
    from linear_cross_entropy.real_logits.model import Snapshot

    snapshot = Snapshot.load(options.model, _device(options))
    facts = environment(options.commit)
    result = real_measure.measure(
        snapshot, options.eps, with_peers=options.peers, with_shares=options.shares, seed=options.seed
    )
    print(f"{facts['gpu'] or facts['cpu']}, torch {facts['torch']}, triton {facts['triton']}")
    real_measure.print_measurement(result, snapshot.record)
    found = report(facts, result.rows, result.skipped)
    _write(options.output, {**found, "model": snapshot.record, **result.report()})


def converge(options: argparse.Namespace) -> None:
    from linear_cross_entropy.real_logits import converge as real_converge
    from linear_cross_entropy.real_logits.tokens import Tokens

    tokens = Tokens.load(options.tokens)
    setting = real_converge.Setting(options.steps)
    records = real_converge.converge(tokens, setting, range(options.seeds), options.eps, _device(options))
    real_converge.print_records(records)
    facts = environment(options.commit)
    _write(
        options.output,
        {
            "environment": facts,
            "setting": asdict(setting),
            "tokens": asdict(tokens.source),
            "seeds": list(range(options.seeds)),
            "runs": records,
        },
    )


def _device(options: argparse.Namespace) -> torch.device:
    torch.set_num_threads(options.threads)
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"written: {path}")


def power(text: str) -> float:
    """An eps: a number, or a power such as 2**-12."""
    base, _, exponent = text.partition("**")
    value = float(base) ** float(exponent) if exponent else float(base)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="{prepare,train,measure,converge}")

    def command(function: Any, summary: str, *, computes: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            function.__name__, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
        )
        sub.set_defaults(run=function)
        if computes:
            sub.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, where there is one")
            sub.add_argument("--threads", type=int, default=2, help="CPU threads")
        return sub

    sub = command(prepare, "token ids of the Python sources on this machine", computes=False)
    sub.add_argument("--tokens", type=Path, required=True, help="npz file to write")
    sub.add_argument("--vocabulary", type=int, default=128_256, help="tokens, of which 257 are given")
    sub.add_argument("--megabytes", type=float, default=80.0, help="of text, at most")
    sub.add_argument("--sources", type=Path, nargs="+", help="folders; default: the standard library, site-packages")
    sub.add_argument("--seed", type=int, default=0, help="of the files' order")

    sub = command(train, "a language model's hidden states and head", computes=True)
    sub.add_argument("--tokens", type=Path, required=True, help="npz file of `prepare`")
    sub.add_argument("--model", type=Path, required=True, help="file to write")
    sub.add_argument("--seconds", type=float, default=100.0, help="of training, behind the first step")
    sub.add_argument("--narrow", type=float, default=0.7, help="part of them with the embedding for a head")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--features", type=int, default=4096, help="of the head in the end; --width at least")
    sub.add_argument("--width", type=int, default=1024)
    sub.add_argument("--layers", type=int, default=8)
    sub.add_argument("--heads", type=int, default=8)
    sub.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    sub.add_argument("--sequences", type=int, default=8, help="a step")
    sub.add_argument("--learning-rate", type=float, default=2e-3)
    sub.add_argument("--rows", type=int, default=8192, help="held-out tokens whose hidden states are saved")
    sub.add_argument("--compile", action="store_true", help="torch.compile the blocks")

    sub = command(measure, "errors, times and memory of filtered gradients", computes=True)
    sub.add_argument("--model", type=Path, required=True, help="file of `train`")
    sub.add_argument("--output", type=Path, required=True, help="JSON file to write")
    sub.add_argument("--eps", type=power, nargs="+", default=FILTERS, help="of grad_filter_eps, such as 2**-12")
    sub.add_argument("--peers", action="store_true", help="other packages too, where they are installed")
    sub.add_argument("--shares", action="store_true", help="other shares of rows with an exact tail too")
    sub.add_argument("--seed", type=int, default=0, help="of the flat input")
    sub.add_argument("--commit", help="the commit measured, where git cannot tell")

    sub = command(converge, "train with exact and with filtered gradients", computes=True)
    sub.add_argument(
        "--tokens",
        type=Path,
        required=True,
        help="npz file of `prepare`; 8192 tokens, with an eps of 2**-9, suit a CPU",
    )
    sub.add_argument("--output", type=Path, required=True, help="JSON file to write")
    sub.add_argument("--eps", type=power, nargs="+", default=[2**-12], help="of grad_filter_eps")
    sub.add_argument("--seeds", type=int, default=3, help="runs with each loss")
    sub.add_argument("--steps", type=int, default=300, help="of each run")
    sub.add_argument("--commit", help="the commit measured, where git cannot tell")
    options = parser.parse_args()
    if options.run is train and (options.features < options.width or options.width % (2 * options.heads)):
        parser.error("train: --features must be at least --width, and --width a multiple of twice --heads")
    if options.run is train and not 0 <= options.narrow < 1:
        parser.error(f"train: --narrow must be at least 0 and below 1, got {options.narrow}")
    return options


def main() -> int:
    options = parse()
    options.run(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
