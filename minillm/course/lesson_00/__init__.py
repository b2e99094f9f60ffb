"""Lesson 00, start here: its checkers and pictures, and where the time of a step goes.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
