"""Token ids of the Python sources on this machine: text that every machine has, and some hundred megabytes of it.

A byte-level BPE of any vocabulary is trained on the text itself (the `tokenizers` package). The ids are stored as an
xz stream in an npz file, about a quarter of the text's size, so that a machine without these sources can train on them.
"""

from __future__ import annotations

import hashlib
import lzma
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = 0.05  # of the files
END_OF_FILE = "<|endoftext|>"  # the token 0, behind every file
_LARGEST_FILE = 1 << 20  # bytes; beyond that are tables, not programs
_BATCH_FILES = 256
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 2, "pb": 2}]  # for elements of 4 bytes


@dataclass(frozen=True)
class Source:
    """Where the tokens come from."""

    vocabulary: int
    seed: int  # of the files' order
    files: int
    text_bytes: int
    text_sha256: str


@dataclass(frozen=True)
class Tokens:
    """All ids in one row, the training files' before `held_out`, the others' behind it."""

    ids: np.ndarray[Any, np.dtype[np.uint32]]
    held_out: int
    source: Source

    def save(self, path: Path) -> None:
        stream = lzma.compress(self.ids.astype("<u4").tobytes(), lzma.FORMAT_XZ, filters=_XZ)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # an open file: given a path, numpy appends a suffix of its own
            np.savez(
                file,
                ids_xz=np.frombuffer(stream, np.uint8),
                held_out=np.int64(self.held_out),
                **{name: np.asarray(value) for name, value in asdict(self.source).items()},
            )

    @classmethod
    def load(cls, path: Path) -> Tokens:
        with np.load(path) as file:
            source = Source(
                int(file["vocabulary"]),
                int(file["seed"]),
                int(file["files"]),
                int(file["text_bytes"]),
                str(file["text_sha256"]),
            )
            ids = np.frombuffer(lzma.decompress(file["ids_xz"].tobytes()), "<u4")
            return cls(ids, int(file["held_out"]), source)


def default_folders() -> list[Path]:
    """The standard library and the installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def read_files(folders: Sequence[Path], most_bytes: int, seed: int) -> list[str]:
    """The *.py files under `folders`, each text once, shuffled; as many as fit into `most_bytes`."""
    paths = sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()})
    texts: dict[bytes, str] = {}
    for path in paths:
        content = path.read_bytes()
        if 0 < len(content) <= _LARGEST_FILE:
            try:
                texts.setdefault(hashlib.sha256(content).digest(), content.decode())
            except UnicodeDecodeError:  # test data of encodings
                continue
    # By content, not by path: the order does not depend on where the folders are.
    ordered = [texts[digest] for digest in sorted(texts)]
    random.Random(seed).shuffle(ordered)
    files: list[str] = []
    size = 0
    for text in ordered:
        size += len(text.encode())
        if size > most_bytes:
            break
        files.append(text)
    return files


def tokenize(files: Sequence[str], vocabulary: int, seed: int) -> Tokens:
    """Train a BPE of exactly `vocabulary` tokens on all files and encode them; the last 5 % of them are held out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if len(files) < 2:
        raise RuntimeError(f"at least two files are needed, one of them held out, and there are {len(files)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_FILE],
        show_progress=False,
    )
    tokenizer.train_from_iterator(files, trainer, length=len(files))
    if tokenizer.get_vocab_size() != vocabulary:
        raise RuntimeError(f"the text has {tokenizer.get_vocab_size()} tokens only, of {vocabulary}: take more of it")

    def encoded() -> Iterator[np.ndarray[Any, np.dtype[np.uint32]]]:
        for start in range(0, len(files), _BATCH_FILES):
            for encoding in tokenizer.encode_batch(list(files[start : start + _BATCH_FILES])):
                yield np.array([*encoding.ids, 0], np.uint32)

    parts = list(encoded())
    training = len(parts) - max(round(HELD_OUT * len(parts)), 1)
    text = "\0".join(files).encode()
    source = Source(vocabulary, seed, len(files), len(text) - len(files) + 1, hashlib.sha256(text).hexdigest())
    return Tokens(np.concatenate(parts), sum(map(len, parts[:training])), source)


def prepare(path: Path, folders: Sequence[Path], *, vocabulary: int, megabytes: float, seed: int) -> None:
    """Write the token ids of up to `megabytes` of text to `path`."""
    files = read_files(folders, int(megabytes * 1e6), seed)
    print(f"{len(files)} files, {sum(map(len, files)) / 1e6:.1f} million characters", flush=True)
    tokens = tokenize(files, vocabulary, seed)
    tokens.save(path)
    print(
        f"{path}: {tokens.ids.size} tokens of {vocabulary}, {tokens.ids.size - tokens.held_out} of them held out; "
        f"{tokens.source.text_bytes / tokens.ids.size:.2f} bytes of text a token, {path.stat().st_size / 1e6:.1f} MB"
    )
