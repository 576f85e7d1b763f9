"""A `SamplingBatch` of any content, for tests of what is right of the seam."""

import numpy as np

from tinyvllm.execution_batch import SamplingBatch
from tinyvllm.request import SamplingParams


def pairs(items):
    return np.array(list(items), np.int64).reshape(-1, 2)


def make_sampling(params: list[SamplingParams], **fields) -> SamplingBatch:
    """One row for each of `params`. `fields` are those of `SamplingBatch`; in addition
    `forbidden` may be a list of (row, token id), and `texts` a list of (prompt, output) by row."""
    texts = fields.pop("texts", [([], [])] * len(params))
    penalized = [row for row, p in enumerate(params) if p.penalizes]
    biased = {(row, i): bias for row, p in enumerate(params) for i, bias in p.logit_bias.items()}
    reporting = [row for row, p in enumerate(params) if p.logprobs is not None]
    history = [
        (index, token_id, generated)
        for index, row in enumerate(penalized)
        for generated, token_ids in enumerate(texts[row])
        for token_id in token_ids
    ]
    defaults = {
        "temperatures": np.array([p.temperature for p in params], np.float32),
        "top_ks": np.array([max(p.top_k, 0) for p in params], np.int64),
        "top_ps": np.array([p.top_p for p in params], np.float32),
        "min_ps": np.array([p.min_p for p in params], np.float32),
        "seeds": np.array([p.seed or 0 for p in params], np.int64),
        "output_indices": np.array([len(output) for _, output in texts], np.int64),
        "allowed": [
            (row, np.array(p.allowed_token_ids, np.int64))
            for row, p in enumerate(params)
            if p.allowed_token_ids is not None
        ],
        "biased": pairs(biased),
        "biases": np.array(list(biased.values()), np.float32),
        "penalized": np.array(penalized, np.int64),
        "penalties": np.array(
            [
                (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
                for p in (params[row] for row in penalized)
            ],
            np.float32,
        ).reshape(-1, 3),
        "history": np.array(history, np.int64).reshape(-1, 3),
        "logprob_rows": np.array(reporting, np.int64),
        "num_logprobs": max((params[row].logprobs for row in reporting), default=0),
    }
    fields["forbidden"] = pairs(fields.get("forbidden", ()))
    if any(params[row].logprobs == -1 for row in reporting):
        defaults["num_logprobs"] = -1
    return SamplingBatch(**defaults | fields)


def repeat_row(params: SamplingParams, seeds, output_indices) -> SamplingBatch:
    """The same parameters at many (seed, output index)."""
    seeds, indices = np.broadcast_arrays(np.asarray(seeds), np.asarray(output_indices))
    num_rows = seeds.size
    return make_sampling(
        [params],
        temperatures=np.full(num_rows, params.temperature, np.float32),
        top_ks=np.full(num_rows, max(params.top_k, 0), np.int64),
        top_ps=np.full(num_rows, params.top_p, np.float32),
        min_ps=np.full(num_rows, params.min_p, np.float32),
        seeds=seeds.flatten().astype(np.int64),
        output_indices=indices.flatten().astype(np.int64),
    )


def greedy_rows(num_rows: int) -> SamplingBatch:
    """Nothing but argmax."""
    return repeat_row(SamplingParams(temperature=0), np.zeros(num_rows, np.int64), 0)
