"""Lesson 08, quantizing the cache, and choosing: its checkers and pictures, small caches, four bits, choices.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
