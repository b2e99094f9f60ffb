"""Long-lived objects are left out of garbage collections while a server or `generate` runs, and not after that."""

import gc
import sys
import weakref

import pytest

from minillm import LLM, SamplingParams, garbage


@pytest.fixture(autouse=True)
def frozen_as_before():
    """What conftest.py has frozen stays so: collections in other tests would visit all tests."""
    before = gc.get_freeze_count()
    yield
    if before and not gc.get_freeze_count():
        gc.freeze()


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_and_inside_but_what_stays_is_not_visited():
    before, kept = weakref.ref(Ring()), Ring()
    with garbage.frozen():
        assert before() is None and gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
        inside = weakref.ref(Ring())
        gc.collect()
        assert inside() is None
    assert any(each is kept for each in gc.get_objects())


def test_blocks_without_full_collections_restore_the_thresholds_in_any_order_even_if_they_raise():
    before = gc.get_threshold()

    def full() -> int:
        return gc.get_threshold()[2]

    never = garbage.NEVER if sys.version_info < (3, 14) else 0
    first, second = garbage.young(), garbage.young()
    with pytest.raises(KeyError), first:
        second.__enter__()
        assert full() == never
        raise KeyError
    assert full() == never, "the second block has not ended"
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_completions_of_many_tokens_do_not_cause_full_collections():
    before, seen = gc.get_threshold(), []
    never = garbage.NEVER if sys.version_info < (3, 14) else 0  # it has no full collections
    with LLM(max_num_seqs=4, max_model_len=64) as llm:
        step = llm.engine.step
        llm.engine.step = lambda: (seen.append(gc.get_threshold()[2]), step())[1]
        llm.generate(["Once", "upon"], SamplingParams(max_tokens=4))
    assert seen and set(seen) == {never} and gc.get_threshold() == before
