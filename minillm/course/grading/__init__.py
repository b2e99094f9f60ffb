"""Read and check the notebooks of learners: those handed in for a grade, and a learner's own earlier ones.

What runs the code of a saved notebook belongs here. The properties that an exercise must have do not.
"""
