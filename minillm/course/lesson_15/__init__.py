"""Lesson 15, adapters and other prompts: its checkers and pictures, engines with adapters, and what one is trained on.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
