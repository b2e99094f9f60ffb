"""A step, as the scheduler hands it to the runner.  Lesson 10."""

from dataclasses import dataclass, field

import numpy as np

from minillm.request import Request


@dataclass
class Step:
    """One launch: for each row, the span of its tokens that runs. Rows with a single token come first."""

    number: int
    rows: np.ndarray  # [n] int32
    starts: np.ndarray  # [n] int32: tokens of the row that are in the cache already
    queries: np.ndarray  # [n] int32: tokens that run now
    samples: np.ndarray  # [n] bool: the row's last known token is among them, so the step yields one more
    singles: int  # how many leading rows run exactly one token
    admitted: list[Request] = field(default_factory=list)  # requests that got their row since the last step
    moved: np.ndarray | None = None  # [n] of streams: blocks that the rows have let go of, which no table has any more
    table_rows: np.ndarray | None = None  # [m] what changed in the block tables: row, column, block a group
    table_columns: np.ndarray | None = None
    table_blocks: np.ndarray | None = None  # [groups, m]
