"""Drawings of traces show what the engine did."""

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from minillm import LLM, SamplingParams
from minillm.course.lesson_10 import pictures as draw_batching
from minillm.course.lesson_10.timeline import (
    COLORS,
    DECODE,
    IDLE,
    PREFILL,
    WAITS,
    draw_timeline,
    row_states,
)
from minillm.trace import Trace

BEGINNING = list(range(100, 148))


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def traced(prompts: list[list[int]], outputs: list[int], **options) -> Trace:
    trace = Trace()
    with LLM(trace=trace, **options) as llm:
        llm.generate(prompts, [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in outputs])
    return trace


@pytest.fixture(scope="module")
def chunked() -> Trace:
    prompts = [BEGINNING + [200 + i, 300 + i] for i in range(6)]
    return traced(prompts, [3, 9, 5, 7, 2, 12], max_num_seqs=4, max_num_batched_tokens=24, num_blocks=40)


def test_row_states_distinguish_prefill_decode_waiting_and_idle():
    trace = traced([[5] * 6, [6] * 3], [3, 1], max_num_batched_tokens=4, run_ahead=0)
    states, steps = row_states(trace)
    assert [step.count for step in steps] == [[4], [2, 2], [1, 1], [1]]
    expected = [[PREFILL, PREFILL, DECODE, DECODE], [IDLE, PREFILL, PREFILL, IDLE]]
    assert states.tolist() == expected


def test_a_row_waits_while_its_last_token_is_launched_but_not_read():
    states, steps = row_states(traced([[5] * 3, [6] * 3], [2, 5], run_ahead=1))
    assert states[0].tolist() == [PREFILL, DECODE, WAITS, IDLE, IDLE]
    for column, step in enumerate(steps):
        assert set(np.nonzero(states[:, column] >= PREFILL)[0]) == set(step.row)


def test_in_flight_batching_fills_rows_that_static_batching_leaves_idle():
    work = [[5] * 4] * 8, [2, 12, 3, 12, 2, 12, 12, 2]
    idle = {
        policy: (row_states(traced(*work, max_num_seqs=2, policy=policy))[0] == IDLE).mean()
        for policy in ("static", "fcfs")
    }
    assert idle["fcfs"] < 0.15 and idle["static"] > 0.3


def test_the_timeline_draws_row_states_by_step_and_by_time(chunked):
    states, steps = row_states(chunked)
    _, axes = plt.subplots(1, 2)
    draw_timeline(chunked, axes[0], rows=7)
    draw_timeline(chunked.events, axes[1], x="time")
    drawn = axes[0].collections[0].get_array()
    assert drawn.shape == (7, len(steps)) and (drawn[:4] == states).all() and not drawn[4:].any()
    assert axes[1].get_xlim() == (steps[0].launched, steps[-1].read)
    names = {text.get_text() for text in axes[0].texts}
    assert names and names <= {"1", "2", "3", "4", "5", "6"}
    axes[0].figure.canvas.draw()


def test_the_timeline_shows_only_the_requested_steps(chunked):
    draw_timeline(chunked, steps=range(5, 10), title="five steps")
    assert plt.gca().get_xlim() == (5, 10) and plt.gca().get_title() == "five steps"
    assert (plt.gca().collections[0].get_array() == row_states(chunked)[0][:, 5:10]).all()


def test_time_between_steps_is_white_and_idle_rows_are_gray():
    trace = traced([[5] * 6, [6] * 3], [3, 6], run_ahead=0)
    states, steps = row_states(trace)
    assert (states == IDLE).any()
    draw_timeline(trace, x="time")
    mesh = plt.gca().collections[0]
    drawn, edges = mesh.get_array(), mesh.get_coordinates()[0, :, 0]
    between = np.ma.getmaskarray(drawn).all(axis=0)
    assert between.any() and drawn.count() == (~between).sum() * len(drawn), "a row must not be white within a step"
    gap = sum(after.launched - before.read for before, after in zip(steps, steps[1:], strict=False))
    assert np.diff(edges)[between].sum() == pytest.approx(gap)
    assert (drawn[:, ~between] == states).all()


def test_requests_have_the_same_colors_in_grids_and_timelines(chunked):
    states, steps = row_states(chunked)
    draw_batching.rows_in_use({"chunked": steps}, rows=len(states))
    drawn = [to_hex(box.get_facecolor()) for box in plt.gca().patches]
    shown = [COLORS[state] for column in states.T for state in column]
    pairs = [pair for pair in zip(drawn, shown, strict=True) if pair[1] not in (COLORS[WAITS], COLORS[IDLE])]
    assert len({shade for _, shade in pairs}) == 2 and all(one == other for one, other in pairs)


def test_what_cannot_be_drawn_raises_a_clear_error(chunked):
    with pytest.raises(ValueError, match="'steps' or 'time', not 'hours'"):
        draw_timeline(chunked, x="hours")
    with pytest.raises(ValueError, match="no such step"):
        draw_timeline(Trace())
    with pytest.raises(ValueError, match="no such step"):
        draw_timeline(chunked, steps=range(1000, 1002))
