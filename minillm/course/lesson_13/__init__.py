"""Lesson 13, speculative decoding: its checkers and pictures, a model with a cache to roll back, drafters to try.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
