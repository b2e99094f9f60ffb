"""Rows take turns where steps go through the stages of a pipeline.

Each stage is to run a step of its own, so as many steps are in flight as there are stages, and no decoding row is in
two of them: the first stage needs the token that the last one samples. If all rows ran in one step, the other stages
would wait for it. So a step takes its share of the running rows, and of the waiting requests. m steps in flight keep
m of P stages busy; a prompt of m chunks takes m + P - 1 times a stage's time, (P - 1) / (m + P - 1) of it waiting
(Huang et al. 2019, "GPipe", section 2.3). Chunks of one prompt need not wait for each other: every stage has the keys
and values of its layers, in order.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .scheduler import Scheduler


def turn(self: "Scheduler", rows: np.ndarray) -> np.ndarray:
    """Choose those of these rows, which could all run, that run in the next step: those that have waited the longest.

    They are at most a share of all running rows, so that each stage has as many, and stay in the order given.
    """
    most = -(-len(self.order) // self.stages)
    waited = np.argsort(self.last_step[rows], kind="stable")
    return rows[np.sort(waited[:most])]
