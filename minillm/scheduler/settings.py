"""Other settings of an idle scheduler for a while, to compare them.  Lessons 10 and 11."""

from collections.abc import Iterator
from contextlib import contextmanager

from minillm.config import PolicyName

from .policies import POLICIES
from .scheduler import Scheduler


@contextmanager
def scheduled(
    scheduler: Scheduler, *, policy: PolicyName | None = None, budget: int | None = None, caching: bool | None = None
) -> Iterator[Scheduler]:
    """Use other settings, and an empty prefix cache, inside the block. No request may run when it begins and ends.

    policy: the order of requests. budget: max_num_batched_tokens, also above that for which the engine has planned its
    memory. caching: whether prefixes are cached. None leaves a setting as it is.
    """
    before = scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching
    scheduler.pool.forget()
    if policy is not None:
        scheduler.policy = POLICIES[policy]()
    if budget is not None:
        scheduler.max_num_batched_tokens = budget
    if caching is not None:
        scheduler.prefix_caching = caching
    try:
        yield scheduler
    finally:
        scheduler.policy, scheduler.max_num_batched_tokens, scheduler.prefix_caching = before
        scheduler.pool.forget()
