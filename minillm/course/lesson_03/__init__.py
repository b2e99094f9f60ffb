"""Lesson 03, Triton kernels: its checkers, and how they run a learner's kernels; its pictures are in `shared`.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
