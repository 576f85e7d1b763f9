"""The sampler beside the vocabulary projection that makes its logits, on the CPU.

    python benchmarks/sampler.py [--threads 1] [--json book/data/sampler.json]

64 rows over GPT-2's 50,257 tokens. The logits are normal numbers with a spread of 3.8, which gives
a distribution an entropy of about 3.6 nats, a perplexity of 36: in the range of GPT-2 124M on the
web text it was trained on. One candidate has a spread of 1, so flat that no nucleus is small.
"""

import argparse
from functools import partial

import numpy as np
import torch
from evidence import interleaved_medians, save

from tinyvllm.execution_batch import SamplingBatch
from tinyvllm.gpt2 import Linear
from tinyvllm.sampler import sample

ROWS, VOCAB_SIZE, WIDTH = 64, 50257, 768
SPREAD, FLAT = 3.8, 1.0
PAST = 300  # tokens of each row that penalties look at


def batch_of(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, edits=False, num_logprobs=None):
    """One batch of equal rows. `edits`: all penalties, a bias and a forbidden token in each."""
    every, rng = np.arange(ROWS), np.random.default_rng(0)
    some = every if edits else every[:0]
    pairs = np.stack([some, rng.integers(0, VOCAB_SIZE, len(some))], axis=1)
    past = rng.integers(0, VOCAB_SIZE, len(some) * PAST)
    return SamplingBatch(
        temperatures=np.full(ROWS, temperature, np.float32),
        top_ks=np.full(ROWS, top_k),
        top_ps=np.full(ROWS, top_p, np.float32),
        min_ps=np.full(ROWS, min_p, np.float32),
        seeds=every,
        output_indices=every,
        allowed=[],
        forbidden=pairs,
        biased=(pairs + np.array([0, 1])) % VOCAB_SIZE,
        biases=np.ones(len(some), np.float32),
        penalized=some,
        penalties=np.full((len(some), 3), [1.1, 0.1, 0.1], np.float32),
        history=np.stack([np.repeat(some, PAST), past, np.arange(len(past)) % 2], axis=1),
        logprob_rows=every if num_logprobs is not None else every[:0],
        num_logprobs=num_logprobs or 0,
    )


def textbook(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The pipeline as one writes it first: whole rows, sorted, a softmax, a draw."""
    logits = logits / temperature
    if top_k or top_p < 1:
        values, token_ids = logits.sort(dim=-1, descending=True)
        if top_k:
            values[:, top_k:] = -torch.inf
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        values[before >= top_p] = -torch.inf
        logits = values.gather(1, token_ids.argsort(dim=-1))
    return torch.multinomial(logits.softmax(-1), 1)


CASES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "edits": True},
    "all without top_k": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "edits": True},
    "top_p, flat": {"temperature": 1.0, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "num_logprobs": 5},
}
TEXTBOOK = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
}


def main():
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="save the figures to this file")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    project, hidden = Linear(torch.randn(VOCAB_SIZE, WIDTH), None), torch.randn(ROWS, WIDTH)
    logits, flat = torch.randn(ROWS, VOCAB_SIZE) * SPREAD, torch.randn(ROWS, VOCAB_SIZE) * FLAT
    # The sampler may edit what it is given. The edits here come again and again, but change
    # only which tokens are likely, not the work.
    candidates = {"projection": partial(project, hidden)}
    for name, params in CASES.items():
        given = flat if name.endswith("flat") else logits.clone()
        candidates[name] = partial(sample, given, batch_of(**params))
    for name, params in TEXTBOOK.items():
        candidates[f"textbook {name}"] = partial(textbook, logits, **params)
    with torch.inference_mode():
        ms = interleaved_medians(candidates, arguments.rounds)
    for name, value in ms.items():
        print(f"{name:20} {value:8.2f} ms, {value / ms['projection']:5.2f} projections")
    if arguments.json:
        shape = {"rows": ROWS, "vocab_size": VOCAB_SIZE, "width": WIDTH, "spread": SPREAD}
        save(arguments.json, shape | {"flat_spread": FLAT, "past": PAST, "ms": ms})


if __name__ == "__main__":
    main()
