"""Which blocks a sequence owns, and which of its tokens are already in some block.

Built, step by step, in notebooks/05_kv_cache.ipynb.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import sha256

from tinyvllm.block_pool import Block, BlockPool
from tinyvllm.sequence import Sequence

ROOT_HASH = bytes(32)  # the parent of a sequence's first block


def hash_block(parent_hash: bytes, token_ids: tuple[int, ...], extra_key: str | None) -> bytes:
    """Return the sha256 that names a full block: its tokens and, by the parent, all before it.

    Keys and values depend on the whole prefix, so the tokens alone would not do. sha256 makes
    a collision, i.e. reading someone else's keys and values, infeasible even on purpose.
    """
    content = parent_hash + array("q", token_ids).tobytes()
    return sha256(content + extra_key.encode() if extra_key else content).digest()


class BlockTable:
    """The blocks of one sequence, in token order; token i lies in `blocks[i // block_size]`.

    Attributes:
        blocks: append-only while the sequence is admitted.
        num_published: how many of the leading blocks are published.
    """

    __slots__ = ("blocks", "num_published")

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.num_published = len(blocks)


class KVCacheManager:
    """Gives sequences the slots for their tokens (follows vllm/v1/core/kv_cache_manager.py).

    Args:
        num_blocks: blocks in the KV cache, the null block included.
        block_size: tokens a block holds.
        enable_caching: find and reuse the blocks of equal prefixes.
        hash_function: names a full block; another one only to study collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        hash_function: Callable[[bytes, tuple[int, ...], str | None], bytes] = hash_block,
    ):
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hash_function = hash_function
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can ever be taken."""
        return self.pool.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, seq: Sequence) -> list[int]:
        """The sequence's block table as ids: row i of the KV cache holds tokens
        `i * block_size` to `(i + 1) * block_size - 1`. Empty if it is not admitted."""
        table = self.tables.get(seq.seq_id)
        return [block.block_id for block in table.blocks] if table else []

    def _full_block_tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(seq.token_ids[start : start + self.block_size])

    def _hash_full_blocks(self, seq: Sequence):
        """Extend the sequence's hash chain over all of its full blocks."""
        hashes = seq.block_hashes
        for index in range(len(hashes), seq.num_tokens // self.block_size):
            parent, salt = (hashes[-1], None) if index else (ROOT_HASH, seq.params.cache_salt)
            token_ids = self._full_block_tokens(seq, index)
            hashes.append(self.hash_function(parent, token_ids, salt))

    def get_computed_blocks(self, seq: Sequence) -> tuple[list[Block], int]:
        """Find the longest cached prefix: its blocks, and how many tokens they hold.

        Only whole blocks count, and at most `num_tokens - 1` tokens: the last token is always
        recomputed, because its logits are needed. A sequence that wants log-probabilities of its
        prompt finds nothing, since it must compute it. Nothing changes but the hash chain.
        """
        hits: list[Block] = []
        if self.enable_caching:
            self._hash_full_blocks(seq)
        if self.enable_caching and not seq.skip_reading_prefix_cache:
            for index in range((seq.num_tokens - 1) // self.block_size):
                block = self.pool.lookup(seq.block_hashes[index])
                # The tokens differ only if two contents share a hash: then it is a miss.
                if block is None or block.token_ids != self._full_block_tokens(seq, index):
                    break
                hits.append(block)
        return hits, len(hits) * self.block_size

    def num_blocks_to_take(self, seq: Sequence, num_tokens: int, hits: list[Block]) -> int:
        """Free blocks that holding `num_tokens` tokens would use up, hits that are free included."""
        table = self.tables.get(seq.seq_id)
        num_held = len(table.blocks) if table else len(hits)
        num_free_hits = sum(block.ref_count == 0 for block in hits)
        return max(self.num_blocks_for(num_tokens) - num_held, 0) + num_free_hits

    def allocate_slots(
        self,
        seq: Sequence,
        num_new_tokens: int,
        hits: list[Block] = (),
        full_sequence_must_fit: bool = False,
    ) -> list[Block] | None:
        """Give the sequence slots for its next tokens, and publish the blocks they fill.

        Args:
            seq: the sequence; `num_computed_tokens` of its tokens have slots.
            num_new_tokens: tokens that need slots after the computed ones and the hits.
            hits: what `get_computed_blocks` found, for a sequence that is being admitted.
            full_sequence_must_fit: refuse unless all of its tokens would fit now.

        Returns:
            The blocks taken, or None if the free blocks do not suffice; then nothing changes.
        """
        block_size = self.block_size
        num_tokens = seq.num_computed_tokens + len(hits) * block_size + num_new_tokens
        table = self.tables.get(seq.seq_id)
        taken: list[Block] = []
        if table is None or num_tokens > len(table.blocks) * block_size:
            must_fit = seq.num_tokens if full_sequence_must_fit else num_tokens
            if self.num_blocks_to_take(seq, must_fit, hits) > self.pool.num_free:
                return None
            if table is None:
                # Touch the hits first, or taking blocks could evict them.
                self.pool.touch(hits)
                table = self.tables[seq.seq_id] = BlockTable(list(hits))
            taken = self.pool.take(self.num_blocks_for(num_tokens) - len(table.blocks))
            table.blocks += taken
        if self.enable_caching and num_tokens // block_size > table.num_published:
            self._publish_full_blocks(seq, table, num_tokens)
        return taken

    def _publish_full_blocks(self, seq: Sequence, table: BlockTable, num_tokens: int):
        self._hash_full_blocks(seq)
        for index in range(table.num_published, num_tokens // self.block_size):
            token_ids = self._full_block_tokens(seq, index)
            self.pool.publish(table.blocks[index], seq.block_hashes[index], token_ids)
        table.num_published = num_tokens // self.block_size

    def free(self, seq: Sequence):
        """Take all blocks back from a sequence, the last one first: the prefix lives longest.

        A sequence that is preempted in the step in which it was scheduled has published blocks
        that will never be computed; those are unpublished. Whoever else holds them was
        admitted in the same step, and is rolled back with it.
        """
        table = self.tables.pop(seq.seq_id, None)
        if table is None:
            return
        for block in table.blocks[seq.num_computed_tokens // self.block_size : table.num_published]:
            self.pool.unpublish(block)
        self.pool.release(reversed(table.blocks))

    def reset_prefix_cache(self):
        """Forget all published blocks, so that nothing computed so far is found again.

        Raises:
            RuntimeError: sequences still hold blocks.
        """
        if self.tables:
            raise RuntimeError(f"cannot reset: {len(self.tables)} sequences hold blocks")
        for block in self.pool.blocks:
            if block.block_hash is not None:
                self.pool.unpublish(block)

    def check_invariants(self, admitted: Iterable[Sequence]):
        """Raise an AssertionError that names the first broken rule.

        Args:
            admitted: the sequences that should hold blocks; their counters are up to date.
        """
        self.pool.check_invariants()
        admitted = list(admitted)
        if {seq.seq_id for seq in admitted} != set(self.tables):
            raise AssertionError(f"tables of {set(self.tables)}, admitted are {admitted}")
        holders = Counter(b.block_id for t in self.tables.values() for b in t.blocks)
        for block in self.pool.blocks:
            if block.ref_count != holders[block.block_id]:
                raise AssertionError(f"{block} is held by {holders[block.block_id]} sequences")
        for seq in admitted:
            self._check_table(seq, self.tables[seq.seq_id])

    def _check_table(self, seq: Sequence, table: BlockTable):
        if len({id(block) for block in table.blocks}) != len(table.blocks):
            raise AssertionError(f"{seq} holds a block twice: {table.blocks}")
        if len(table.blocks) != self.num_blocks_for(seq.num_computed_tokens):
            raise AssertionError(f"{seq} holds {len(table.blocks)} blocks")
        num_full = seq.num_computed_tokens // self.block_size
        if table.num_published != (num_full if self.enable_caching else 0):
            raise AssertionError(f"{seq} has published {table.num_published} blocks")
        parent, salt = ROOT_HASH, seq.params.cache_salt
        for index, block in enumerate(table.blocks[: table.num_published]):
            token_ids = self._full_block_tokens(seq, index)
            parent, salt = self.hash_function(parent, token_ids, salt), None
            if block.block_hash != parent or block.token_ids != token_ids:
                raise AssertionError(f"{seq}: {block} is published for other tokens")
        for block in table.blocks[table.num_published :]:
            if block.block_hash is not None or block.ref_count != 1:
                raise AssertionError(f"{seq}: {block} is not full, yet published or shared")
