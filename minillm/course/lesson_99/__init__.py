"""Lesson 99, serve and benchmark: its checkers and pictures, its report card, and open loops.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
