"""Lesson 11, fusion, CUDA graphs and tuning: its checkers, and what graph sizes cost; its pictures are in `shared`.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
