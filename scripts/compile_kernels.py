"""Compile every Triton kernel for two GPU generations, here, without a GPU, and read the result.

python scripts/compile_kernels.py [--head-size 64] [--dtype float16] [--json FILE]

Prints registers a thread, bytes spilled, shared memory a program, and whether the widest global
loads are the widest there are (16 bytes a thread). The exit status is 1 if a kernel spills at
GPT-2's head size, 64.

What is compiled is what a launch asks for: the launching functions run with tensors on the CPU,
and the compiler gets the arguments in place of the GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # triton reads it when it is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tinyvllm.triton_attention import decode_attention, paged_attention, store_kv

ARCHITECTURES = (80, 90)  # A100, H100
DTYPES = ("float16", "bfloat16", "float32")
# GPT-2 of every size has heads of 64 and a group of one; the others show the kernels' limits.
SHAPES = ((16, 1), (64, 1), (64, 4), (80, 1), (128, 1), (128, 4), (256, 1))  # head size, group
KV_HEADS, BLOCK_SIZE, MAX_SPLITS = 12, 16, 4
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LOADS = re.compile(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)|cp\.async\.c[ag][^;]*, 0x(\w+),")


def launches(dtype: torch.dtype, head_size: int, group: int) -> list[tuple]:
    """(kernel, arguments, options) of every launch that one layer makes."""
    recorded = []

    def record(kernel, *args, grid, warmup, **options):
        recorded.append((kernel, args, options))

    width, heads = KV_HEADS * head_size, KV_HEADS * group
    # Queries, keys and values of a token lie side by side, as the model makes them.
    rows = torch.empty(4, (heads + 2 * KV_HEADS) * head_size, dtype=dtype)
    query, key, value = rows.split([heads * head_size, width, width], dim=1)
    query, key, value = (part.unflatten(1, (-1, head_size)) for part in (query, key, value))
    caches = torch.empty(2, 3, BLOCK_SIZE, KV_HEADS, head_size, dtype=dtype)
    where = [torch.zeros(shape, dtype=torch.int32) for shape in (5, 4, (4, 8))]
    output = torch.empty(4, heads, head_size, dtype=dtype)
    run, triton.JITFunction.run = triton.JITFunction.run, record
    try:
        store_kv(key, value, *caches, torch.zeros(4, dtype=torch.int64))
        decode_attention(output, query, *caches, *where, 1.0, MAX_SPLITS)
        paged_attention(output, query, *caches, *where, 1.0, skip_decodes=True)
    finally:
        triton.JITFunction.run = run
    return recorded


def compile_launch(kernel, args: tuple, options: dict, architecture: int) -> dict:
    """Compile one launch for `sm_<architecture>`; what the compiler says about the result."""
    signature, constants, attributes = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]  # PyTorch's allocations are aligned
        else:
            signature[param.name] = TYPES[type(value)]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "registers": usage["REG"],
        "spilled_bytes": usage["STACK"] + usage["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": widest_load(compiled.asm["ptx"]) == 16,
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What `cuobjdump -res-usage` says: REG a thread, STACK and LOCAL bytes a thread, ..."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [BINARIES / "cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


def widest_load(ptx: str) -> int:
    """Bytes of the widest load from global memory, asynchronous copies included."""
    return max(
        int(size, 16) if size else int(vector or 1) * int(bits) // 8
        for vector, bits, size in LOADS.findall(ptx)
    )


def compile_all(head_sizes: list[int], dtypes: list[str]):
    """Compile and yield a row per (dtype, shape, kernel, architecture)."""
    for dtype in dtypes:
        for head_size, group in SHAPES:
            if head_size not in head_sizes:
                continue
            for kernel, args, options in launches(getattr(torch, dtype), head_size, group):
                for architecture in ARCHITECTURES:
                    yield {
                        "kernel": kernel.__name__.removesuffix("_kernel"),
                        "dtype": dtype,
                        "head_size": head_size,
                        "group": group,
                        "arch": architecture,
                        **compile_launch(kernel, args, options, architecture),
                    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = sorted({head_size for head_size, _ in SHAPES})
    parser.add_argument("--head-size", type=int, choices=sizes, help="only this one")
    parser.add_argument("--dtype", choices=DTYPES, help="only this one")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    print(f"triton {triton.__version__}, blocks of {BLOCK_SIZE}, {KV_HEADS} KV heads")
    print("kernel            dtype    head group  arch registers spilled  shared 16-byte loads")
    rows = []
    for row in compile_all(
        [options.head_size] if options.head_size else sizes,
        [options.dtype] if options.dtype else DTYPES,
    ):
        rows.append(row)
        print(
            f"{row['kernel']:16}{row['dtype']:>9}{row['head_size']:6}{row['group']:6}"
            f"{row['arch']:6}{row['registers']:10}{row['spilled_bytes']:8}"
            f"{row['shared_bytes']:8} {row['wide_loads']}",
            flush=True,
        )
    if options.json:
        git = ["git", "rev-parse", "--short", "HEAD"]
        circumstances = {
            "triton": triton.__version__,
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
        }
        text = json.dumps({"circumstances": circumstances, "kernels": rows}, indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return int(any(row["spilled_bytes"] for row in rows if row["head_size"] == 64))


if __name__ == "__main__":
    sys.exit(main())
