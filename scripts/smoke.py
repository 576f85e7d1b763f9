"""Does the whole engine work on this machine? Seconds on a CPU; the exit status is 0 if it does.

python scripts/smoke.py [MODEL]        a folder or hub id; default: the model that ships with us
"""

import sys
import time

from tinyvllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "Once upon a time there was a", "The old boat"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def token_ids(llm: LLM, prompts, params: SamplingParams) -> list[list[int]]:
    """The generated ids of every prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def check_naive_loop(model: str | None, expected: list[list[int]]) -> str:
    """Recompute the whole text for every token, alone and without a cache: the same tokens."""
    llm = LLM(model, device="cpu", enable_prefix_caching=False, max_num_seqs=1)
    one = SamplingParams(temperature=0, max_tokens=1)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        prompt_ids = llm.tokenizer.encode(prompt)
        for i, token_id in enumerate(answer):
            (got,) = token_ids(llm, prompt_ids + answer[:i], one)
            assert got == [token_id], f"{prompt!r}: token {i} is {token_id}, the loop says {got[0]}"
    return f"{sum(map(len, expected))} tokens"


def check_tight_memory(model: str | None, expected: list[list[int]]) -> str:
    """Small chunks, and so few blocks that requests push each other out: the same tokens."""
    llm = LLM(
        model, device="cpu", block_size=4, num_gpu_blocks_override=14, max_num_batched_tokens=5
    )
    preempted = []
    llm.engine.observers.append(lambda event: preempted.extend(event.preempted))
    assert token_ids(llm, PROMPTS, GREEDY) == expected, "other tokens than with plenty of memory"
    assert preempted, "nobody was preempted"
    return f"{len(preempted)} preemptions"


def check_prefix_cache(llm: LLM, expected: list[list[int]]) -> str:
    """Prompts that were seen before are found in the cache: less work, the same tokens."""
    long_prompt = llm.tokenizer.encode(PROMPTS[0]) + expected[0]
    cold, warm = (llm.generate(long_prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens > 0, "the second run found nothing in the cache"
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids, "cached tokens differ"
    return f"{warm.num_cached_tokens} of {len(long_prompt)} prompt tokens cached"


def check_seeds(llm: LLM) -> str:
    """A seeded story is the same alone and in company."""
    drawn = SamplingParams(temperature=1.0, max_tokens=24, seed=11)
    company = token_ids(llm, PROMPTS, drawn)
    for prompt, together in zip(PROMPTS, company, strict=True):
        assert token_ids(llm, prompt, drawn) == [together], f"{prompt!r} changed"
    return f"{len(PROMPTS)} stories"


def check_abandoned_stream(llm: LLM) -> str:
    """Who leaves a stream early leaves no blocks behind."""
    free = llm.engine.kv.num_free_blocks
    for _ in llm.stream(PROMPTS, GREEDY):
        assert llm.engine.kv.num_free_blocks < free
        break
    assert llm.engine.kv.num_free_blocks == free, "blocks leaked"
    return f"{free} blocks free, as before"


def check_bad_prompts(llm: LLM, expected: list[list[int]]) -> str:
    """A prompt that cannot be served gets an error, and harms nobody."""
    bad = ["", [-1], [0] * llm.engine.config.max_model_len]
    outputs = llm.generate([*bad, *PROMPTS], GREEDY, use_tqdm=False)
    assert all(output.error for output in outputs[:3]), "a bad prompt was served"
    assert [output.outputs[0].token_ids for output in outputs[3:]] == expected
    return f"{len(bad)} errors"


def main(model: str | None = None) -> int:
    """Run the checks and print one line for each."""
    start = time.monotonic()
    llm = LLM(model, device="cpu")
    story, *_ = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    print(f"      {story.prompt}{story.outputs[0].text}")
    expected = token_ids(llm, PROMPTS, GREEDY)
    checks = {
        "naive loop": lambda: check_naive_loop(model, expected),
        "tight memory": lambda: check_tight_memory(model, expected),
        "prefix cache": lambda: check_prefix_cache(llm, expected),
        "seeds": lambda: check_seeds(llm),
        "abandoned stream": lambda: check_abandoned_stream(llm),
        "bad prompts": lambda: check_bad_prompts(llm, expected),
    }
    num_failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}")
        except AssertionError as error:
            print(f"FAIL  {name}: {error}")
            num_failed += 1
    print(f"{len(checks) - num_failed} of {len(checks)} in {time.monotonic() - start:.0f} s")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
