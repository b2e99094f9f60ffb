"""Lesson 14, several GPUs: its checkers and pictures, ranks that are threads, and what the engine's ranks run.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
