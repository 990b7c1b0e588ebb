"""Reads code that Inductor wrote, and compiles the Triton kernels in it for a GPU of compute capability 9.0.

    python tests/compile/compile_kernels.py XBLOCK=16 num_warps=4 < code

It prints a line for each: its name, and how often values go from one layout over the threads to another one, by way of
shared memory for the most part (`ttg.convert_layout` in Triton's intermediate code). Inductor's decorators, which would
launch the kernels, are left out.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''',", re.DOTALL)
_DECORATOR = re.compile(r"^@triton_heuristics\.\w+\(.*?^\)\n", re.DOTALL | re.MULTILINE)
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")
# Sizes that are multiples of 16. It decides, as that of pointers does, how wide loads are.
_ATTRIBUTES = re.compile(r"'configs': \[(\{.*?\})\]\}")


def main() -> int:
    options = {name: int(value) for name, value in (argument.split("=") for argument in sys.argv[1:])}
    num_warps = options.pop("num_warps")
    kernels = _KERNEL.findall(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in kernels:
            signature = ast.literal_eval(_SIGNATURE.search(text)[1])
            path = Path(folder, f"{name}.py")
            path.write_text(_DECORATOR.sub("", text).replace("triton_helpers.set_driver_to_cpu()", ""))
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            attributes = ast.literal_eval(_ATTRIBUTES.search(text)[1])
            # On a GPU all of them: Inductor copies inputs that are not.
            pointers = [place for place, kind in enumerate(signature.values()) if kind.startswith("*")]
            attributes |= {(place,): [["tt.divisibility", 16]] for place in pointers}
            source = ASTSource(getattr(module, name), signature, constexprs=options, attrs=attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
            print(name, compiled.asm["ttgir"].count("ttg.convert_layout"))
    return 0 if kernels else 1


if __name__ == "__main__":
    raise SystemExit(main())
