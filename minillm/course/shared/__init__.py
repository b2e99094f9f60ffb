"""Shared by several lessons: how an exercise is checked, tiers, predictions, pictures, models and texts to measure on.

What belongs to one lesson does not belong here: nothing here imports a lesson, except to list all exercises.
"""
