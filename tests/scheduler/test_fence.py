"""Rows and blocks stay held until the last step that may touch them has been read, and no longer."""

from minillm.scheduler.fence import Fence


def test_what_is_given_up_later_may_be_free_earlier():
    """A block that a window has left may be in a step in flight; a row that ended may be in none of the newest."""
    fence = Fence()
    fence.hold(5, [1])
    fence.hold(3, [2, 4], row=7)
    fence.hold(4, [])
    assert sorted(fence.blocks) == [1, 2, 4] and fence.rows == [7]
    assert list(fence.release(2)) == []
    assert list(fence.release(3)) == [(7, [2, 4])]
    assert fence.rows == [] and fence.blocks == [1]
    assert list(fence.release(6)) == [(-1, []), (-1, [1])]
    assert fence.blocks == []
