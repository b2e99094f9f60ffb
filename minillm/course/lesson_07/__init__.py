"""Lesson 07, quantizing activations: its checkers and pictures, and the model with eight-bit activations.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
