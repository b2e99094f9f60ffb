"""Lesson 09, paged memory: its checkers and pictures, and small engines whose blocks are drawn.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
