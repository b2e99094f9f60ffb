"""Lesson 01, tokenization: its checkers and pictures, and what it measures about vocabularies.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
