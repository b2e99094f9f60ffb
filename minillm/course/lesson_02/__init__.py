"""Lesson 02, attention and the KV cache: its checkers with what they call, its pictures, and a look into the model.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
