"""Pass on of a build's output, read from standard input, a line every tenth of the way; all of it goes to a file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

STEP = re.compile(r"^\s*\[(\d+)/(\d+)\] ")


def main(log: Path) -> None:
    tenths = 0
    with log.open("w") as file:
        for line in sys.stdin:
            file.write(line)
            step = STEP.match(line)
            if step is None:
                continue
            done, total = map(int, step.groups())
            if done * 10 // total > tenths or done == 1:
                tenths = done * 10 // total
                print(f"torch_dcs_ops: compiling, {done} of {total}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
