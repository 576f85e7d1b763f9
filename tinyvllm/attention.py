"""Paged attention: keys and values in blocks, read through a block table, on the CPU.

Built, step by step, in notebooks/09_attention.ipynb.
"""

import torch
from torch import Tensor


class PagedKVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    `keys` and `values` are `[num_layers, num_blocks, block_size, num_heads, head_size]`. A slot
    is one token's place: `block * block_size + offset`. Block 0 is the null block, the harmless
    target of padding. Which block belongs to whom is the control plane's business (chapter 5).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        shape = (num_layers, num_blocks, block_size, num_heads, head_size)
        self.block_size = block_size
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(
        num_layers: int, block_size: int, num_heads: int, head_size: int, dtype: torch.dtype
    ) -> int:
        """Memory that one block takes, keys and values of all layers together."""
        return 2 * num_layers * block_size * num_heads * head_size * dtype.itemsize

    def store(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write `[T, H, D]` keys and values of one layer to the slots `int64 [T]`."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def gather(self, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[length, H, D]` of one sequence, copied out of its blocks."""
        keys = self.keys[layer, block_ids].flatten(0, 1)[:length]
        values = self.values[layer, block_ids].flatten(0, 1)[:length]
        return keys, values


def reference_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """The definition that every kernel is tested against: plain, in float32, one query a time.

    query `[T, H, D]` over flat tokens; key_cache, value_cache `[num_blocks, block_size, H, D]`
    of one layer; query_start_loc `[S + 1]`; seq_lens `[S]`, the keys visible to the last query
    of each sequence; block_table `[S, max_blocks]`. Returns `[T, H, D]` in query's dtype.
    A query at position p of its sequence sees the keys 0..p and no others.
    """
    block_size = key_cache.shape[1]
    output = torch.empty_like(query)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[seq : seq + 2].tolist()
        for row in range(start, end):
            position = seq_len - (end - row)
            keys = torch.arange(position + 1, device=query.device)
            blocks, offsets = block_table[seq, keys // block_size].long(), keys % block_size
            k = key_cache[blocks, offsets].float()  # [position + 1, H, D]
            v = value_cache[blocks, offsets].float()
            scores = torch.einsum("hd,khd->hk", query[row].float(), k) * scale
            output[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(query.dtype)
    return output
