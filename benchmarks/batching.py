"""What many prompts in one call are worth: one call for each against one call for all.

    python benchmarks/batching.py [--json book/data/batching.json]

The shipped model, greedy, without the prefix cache, so that every call computes its prompts.
"""

import argparse
from itertools import islice

from evidence import interleaved_medians, save

from tinyvllm import LLM, SamplingParams

TRAITS = ["brave", "quiet", "kind", "clever", "calm", "loyal", "gentle", "polite"]
KINDS = ["fox", "mouse", "goose", "girl"]
TOKENS = 20  # of each continuation


def prompts(number: int) -> list[str]:
    """The beginnings of so many stories, no two the same."""
    starts = (f"Once upon a time, a {trait} {kind} lived" for trait in TRAITS for kind in KINDS)
    return list(islice(starts, number))


def measure(llm: LLM, number: int, rounds: int) -> dict:
    """Tokens per second of so many prompts, one by one and together."""
    texts = prompts(number)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    calls = {
        "one by one": lambda: [llm.generate(text, params, use_tqdm=False) for text in texts],
        "together": lambda: llm.generate(texts, params, use_tqdm=False),
    }
    milliseconds = interleaved_medians(calls, rounds)
    rates = {name: number * TOKENS / ms * 1000 for name, ms in milliseconds.items()}
    return {"prompts": number, "tokens_per_second": rates}


def main():
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm = LLM(device="cpu", num_gpu_blocks_override=400, enable_prefix_caching=False)
    rows = [measure(llm, number, arguments.rounds) for number in (1, 2, 4, 8, 16, 32)]
    for row in rows:
        print(row)
    if arguments.json:
        save(arguments.json, {"tokens": TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
