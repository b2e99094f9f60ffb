"""Long-lived objects are left out of garbage collections while a server or `generate` runs, and not after that."""

import gc
import os
import subprocess
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


def kept_threshold() -> int:
    """What is read after NEVER was set: 0 in a Python that has no full collections."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], garbage.NEVER)
    kept = gc.get_threshold()[2]
    gc.set_threshold(*before)
    return kept


def test_blocks_without_full_collections_restore_the_thresholds_in_any_order_even_if_they_raise():
    before = gc.get_threshold()

    def full() -> int:
        return gc.get_threshold()[2]

    never = kept_threshold()
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
    never = kept_threshold()
    with LLM(max_num_seqs=4, max_model_len=64) as llm:
        step = llm.engine.step
        llm.engine.step = lambda: (seen.append(gc.get_threshold()[2]), step())[1]
        llm.generate(["Once", "upon"], SamplingParams(max_tokens=4))
    assert seen and set(seen) == {never} and gc.get_threshold() == before


FORKED = """
import gc, os, threading
from minillm import garbage
before, inside, over = gc.get_threshold(), threading.Event(), threading.Event()
def work():
    with garbage.young():
        inside.set()
        over.wait()
thread = threading.Thread(target=work)
thread.start()
inside.wait()
child = os.fork()
if not child:
    with garbage.young():
        pass
    os._exit(gc.get_threshold() != before)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
print(os.waitstatus_to_exitcode(status), gc.get_threshold() == before)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_forked_inside_a_block_has_full_collections():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.stdout == "0 True\n", done.stderr
