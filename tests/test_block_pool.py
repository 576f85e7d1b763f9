"""The block pool: the rules that `check_invariants` names when they are broken."""

import pytest

from tinyvllm.block_pool import BlockPool


def pool_with_copies() -> BlockPool:
    """Blocks 1 and 2 are held, with the same content; 3 is free."""
    pool = BlockPool(4)
    for block in pool.take(2):
        pool.publish(block, b"same", (1, 2))
    pool.check_invariants()
    return pool


def prepend_twice(pool):
    pool.free_list.prepend(pool.blocks[3])  # it is there already: the list runs in circles


def lose_a_block(pool):
    pool.free_list.popleft()


def hand_out_the_null_block(pool):
    pool.blocks[0].ref_count = 1


def release_twice(pool):
    pool.release([pool.blocks[1]])
    pool.release([pool.blocks[1]])


def forget_a_hash(pool):
    pool.blocks[1].block_hash = None


def change_a_hash(pool):
    pool.blocks[1].block_hash = b"other"


def collide(pool):
    pool.blocks[1].token_ids = (3, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (prepend_twice, "the free list is damaged"),
        (lose_a_block, "free list and ref counts disagree on blocks {3}"),
        (hand_out_the_null_block, "the null block was handed out"),
        (release_twice, "free list and ref counts disagree on blocks {1}"),
        (forget_a_hash, "map and block hashes disagree on blocks {1}"),
        (change_a_hash, "are filed under a wrong hash"),
        (collide, "hash collision between blocks"),
    ],
)
def test_each_broken_rule_is_named(damage, message):
    pool = pool_with_copies()
    damage(pool)
    with pytest.raises(AssertionError) as error:
        pool.check_invariants()
    assert message in str(error.value)


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_a_pool_needs_a_block_beside_the_null_block(num_blocks):
    with pytest.raises(ValueError, match=rf"num_blocks must be at least 2 .*, got {num_blocks}"):
        BlockPool(num_blocks)
