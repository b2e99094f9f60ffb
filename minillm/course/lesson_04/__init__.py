"""Lesson 04, attention kernels: its checkers with their cases, its pictures, and the numbers that it shows.

What this lesson introduces belongs here. What several lessons use alike does not: it is in `shared`.
"""
