"""KV blocks: who holds them, which are free, and which can be found again by their content.

Built, step by step, in notebooks/04_block_pool.ipynb.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

NULL_BLOCK_ID = 0  # never handed out: the harmless target of padding


class Block:
    """The bookkeeping of one KV block. Its keys and values live in the KV cache's tensors.

    Attributes:
        block_id: row of the KV cache, from 0.
        ref_count: sequences that hold the block.
        block_hash: set while the block is published, i.e. can be found by its content.
        token_ids: the tokens whose keys and values a published block holds.
        prev, next: neighbours in the free list; None while the block is held.
    """

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.token_ids: tuple[int, ...] = ()
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        published = f", {self.block_hash.hex()[:8]}" if self.block_hash else ""
        return f"Block({self.block_id}, {self.ref_count} refs{published})"


class FreeList:
    """A doubly linked list through the blocks themselves: every operation is O(1) a block.

    The links are fields of the blocks, so a block is removed from the middle without a
    search, and nothing is allocated (`FreeKVCacheBlockQueue` in vllm/v1/core/kv_cache_utils.py).
    One extra block, the anchor, closes the ring, so that linking and unlinking have no edge case.
    """

    def __init__(self, blocks: Iterable[Block]):
        self.anchor = Block(-1)
        self.anchor.prev = self.anchor.next = self.anchor
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def _insert_between(self, prev: Block, block: Block, next: Block):
        prev.next = next.prev = block
        block.prev, block.next = prev, next
        self.num_blocks += 1

    def append(self, block: Block):
        """Add at the end: the last to be handed out."""
        self._insert_between(self.anchor.prev, block, self.anchor)

    def prepend(self, block: Block):
        """Add at the front: the first to be handed out."""
        self._insert_between(self.anchor, block, self.anchor.next)

    def remove(self, block: Block):
        """Take a block out from wherever it stands."""
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.num_blocks -= 1

    def popleft(self) -> Block:
        """Take the block at the front. Raises IndexError when the list is empty."""
        block = self.anchor.next
        if block is self.anchor:
            raise IndexError("the free list is empty")
        self.remove(block)
        return block

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        block = self.anchor.next
        while block is not self.anchor:
            yield block
            block = block.next


class BlockPool:
    """All KV blocks of an engine (follows vllm/v1/core/block_pool.py).

    A block is *held* (ref_count > 0) or *free* (in the free list). Either kind may be
    *published*: findable by the hash of its content and of all that precedes it.

    Args:
        num_blocks: blocks in the KV cache, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is null), got {num_blocks}")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_list = FreeList(self.blocks[NULL_BLOCK_ID + 1 :])
        # hash -> the published blocks of that content by id, oldest first. Copies are kept,
        # because block tables are append-only.
        self.published: dict[bytes, dict[int, Block]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self.free_list)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be taken: all but the null block."""
        return len(self.blocks) - 1

    def publish(self, block: Block, block_hash: bytes, token_ids: tuple[int, ...]):
        """Make a full block findable by its content."""
        block.block_hash = block_hash
        block.token_ids = token_ids
        self.published.setdefault(block_hash, {})[block.block_id] = block

    def unpublish(self, block: Block):
        """Forget a block's content; other blocks of the same content stay findable."""
        copies = self.published[block.block_hash]
        del copies[block.block_id]
        if not copies:
            del self.published[block.block_hash]
        block.block_hash = None
        block.token_ids = ()

    def lookup(self, block_hash: bytes) -> Block | None:
        """Return the oldest published block of this content, held or free, or None."""
        copies = self.published.get(block_hash)
        return next(iter(copies.values())) if copies else None

    def take(self, num_blocks: int) -> list[Block]:
        """Hand out blocks from the front of the free list, each with ref_count 1.

        A taken block will be overwritten, so it is unpublished first.

        Raises:
            ValueError: fewer than `num_blocks` are free; nothing changes.
        """
        if num_blocks > self.num_free:
            raise ValueError(f"cannot take {num_blocks} blocks, {self.num_free} are free")
        taken = [self.free_list.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                self.unpublish(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[Block]):
        """Hold blocks that were found by content; free ones leave the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_list.remove(block)
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]):
        """Give blocks up, in the order in which they should be reused.

        Blocks without a hash go to the front of the free list: nothing is lost with them.
        Blocks with one go to the end: the least recently used is overwritten first.
        """
        unpublished = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    unpublished.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unpublished):
            self.free_list.prepend(block)

    def check_invariants(self):
        """Raise an AssertionError that names the first broken rule."""
        # A damaged list may run in circles: look at no more blocks than there are.
        free_ids = [block.block_id for block in islice(self.free_list, len(self.blocks))]
        if len(free_ids) != len(set(free_ids)) or len(free_ids) != self.num_free:
            raise AssertionError(f"the free list is damaged: {free_ids}, count {self.num_free}")
        if NULL_BLOCK_ID in free_ids or self.blocks[NULL_BLOCK_ID].ref_count:
            raise AssertionError("the null block was handed out")
        expected = {block.block_id for block in self.blocks[1:] if block.ref_count == 0}
        if set(free_ids) != expected:
            raise AssertionError(
                f"free list and ref counts disagree on blocks {set(free_ids) ^ expected}"
            )
        found = {b.block_id for copies in self.published.values() for b in copies.values()}
        carrying = {block.block_id for block in self.blocks if block.block_hash is not None}
        if found != carrying:
            raise AssertionError(f"map and block hashes disagree on blocks {found ^ carrying}")
        for block_hash, copies in self.published.items():
            if any(block.block_hash != block_hash for block in copies.values()):
                raise AssertionError(f"blocks {list(copies)} are filed under a wrong hash")
            if len({block.token_ids for block in copies.values()}) != 1:
                raise AssertionError(f"hash collision between blocks {list(copies)}")
