"""Lesson 06, AWQ and GPTQ: its checkers and pictures, and the model quantized with recorded statistics.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
