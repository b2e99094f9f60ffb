"""Make what learners open: notebooks from sources, a lab, a copy without solutions, notebooks for Colab.

What writes or runs notebooks belongs here. What a notebook imports does not, nor what checks an exercise.
"""
