"""Advise what fits, what is fast, and which precision to choose, without running a model.  Lesson 08.

Estimates, recommendations and plans belong here. Measuring does not (`tuning`, `bench`), and nothing here changes an
engine.
"""
