"""Lesson 05, quantizing weights: its checkers and pictures, and the engine on a learner's weight formats.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
