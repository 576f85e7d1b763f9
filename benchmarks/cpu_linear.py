"""Linear layers on the CPU: PyTorch's default, oneDNN on packed weights, and their bits.

    python benchmarks/cpu_linear.py [--json book/data/cpu_linear.json]

For the matrices of GPT-2 124M and of the shipped model, and several numbers of rows.
"""

import argparse

import torch
import torch.nn.functional as F
from evidence import interleaved_medians, save

from tinyvllm.gpt2 import Linear, TiedHead

MATRICES = {
    "124M attn.c_attn": (768, 2304),
    "124M attn.c_proj": (768, 768),
    "124M mlp.c_fc": (768, 3072),
    "124M mlp.c_proj": (3072, 768),
    "tiny attn.c_attn": (128, 384),
    "tiny mlp.c_fc": (128, 512),
}
HEADS = {"124M head": (768, 50257), "tiny head": (128, 1024)}
ROWS = (1, 2, 4, 8, 16, 64, 256)
ROWS_FOR_BITS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 128)


def rows_with_other_bits(run, inputs: int) -> list[int]:
    """The batch sizes at which some row differs from the same row in a batch of 128."""
    x = torch.randn(128, inputs)
    together = run(x)
    return [n for n in ROWS_FOR_BITS if not torch.equal(run(x[:n].contiguous()), together[:n])]


def measure(name: str, inputs: int, outputs: int, rounds: int, head: bool) -> dict:
    """Milliseconds by number of rows, and the batch sizes that change a row's bits."""
    weight = torch.randn(outputs, inputs) * 0.02
    bias = None if head else torch.randn(outputs)
    candidates = {
        "default": lambda x: F.linear(x, weight, bias),
        "packed": Linear(weight, bias),
    }
    if head:
        candidates["plain oneDNN"] = TiedHead(weight)
    result = {"name": name, "inputs": inputs, "outputs": outputs, "ms": {}, "other_bits": {}}
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        result["ms"][rows] = interleaved_medians(
            {label: lambda run=run, x=x: run(x) for label, run in candidates.items()}, rounds
        )
    for label, run in candidates.items():
        result["other_bits"][label] = rows_with_other_bits(run, inputs)
    x = torch.randn(64, inputs)
    result["largest_difference"] = float(
        (candidates["default"](x) - candidates["packed"](x)).abs().max()
    )
    return result


def main():
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures to this file")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    with torch.inference_mode():
        layers = [measure(n, *shape, arguments.rounds, False) for n, shape in MATRICES.items()]
        heads = [measure(n, *shape, arguments.rounds // 3, True) for n, shape in HEADS.items()]
    for row in [*layers, *heads]:
        print(row)
    if arguments.json:
        save(arguments.json, {"layers": layers, "heads": heads})


if __name__ == "__main__":
    main()
