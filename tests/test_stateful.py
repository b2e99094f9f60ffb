"""The reader's own policy and block pool in the running engine."""

import pytest

import minillm
from minillm import LLM, SamplingParams
from minillm.policies import FirstComeFirstServed

PROMPTS = [list(range(5, 5 + length)) for length in (9, 2, 40, 5, 17, 33)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 24, "num_blocks": 12}


class LastComeFirstServed(FirstComeFirstServed):
    fair = False

    def key(self, request):
        return -request.arrival


class DictPool:
    """A block pool that owes nothing to the engine's: a set of free blocks, a dictionary of holders. No prefixes."""

    cached = 0

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.free = set(range(num_blocks))
        self.holders = {}

    @property
    def available(self):
        return len(self.free)

    def allocate(self, count):
        blocks = [self.free.pop() for _ in range(count)]
        self.holders |= dict.fromkeys(blocks, 1)
        return blocks

    def share(self, blocks):
        for block in blocks:
            self.holders[block] += 1

    def release(self, blocks):
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                del self.holders[block]
                self.free.add(block)

    def lookup(self, keys):
        return []

    def register(self, block, key):
        pass

    def forget(self):
        pass

    def unreferenced(self, blocks):
        return 0


@pytest.fixture(scope="module")
def llm():
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return tokens(llm)


def tokens(llm, prompts=PROMPTS, params=GREEDY):
    return [each.token_ids for each in llm.generate(prompts, params)]


def class_names(llm):
    return type(llm.engine.scheduler.policy).__name__, type(llm.engine.scheduler.pool).__name__


OWN = ("FirstComeFirstServed", "BlockPool")


def test_the_readers_classes_run_in_generate_and_leave_the_engines_own(llm, expected):
    with minillm.using(policy=LastComeFirstServed, block_pool=DictPool) as used:
        assert tokens(llm) == expected
        assert class_names(llm) == ("LastComeFirstServed", "DictPool")
        assert len(llm.engine.scheduler.pool.free) == OPTIONS["num_blocks"], "blocks leaked"
    assert used.calls["policy"] > len(PROMPTS) and used.calls["block_pool"] > len(PROMPTS)
    assert not used.not_solved
    counted = dict(used.calls)
    assert tokens(llm) == expected and class_names(llm) == OWN
    assert used.calls == counted
