"""Lesson 10, in-flight batching: its checkers, and its pictures with their timeline; what it runs is in `shared`.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
