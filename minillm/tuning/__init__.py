"""`minillm build`: choose options and kernel launch configurations by measuring them on this GPU.  Lesson 11.

Trials of options and of kernel launch configurations belong here, and the file that keeps the winners. What the engine
does with that file does not: the runner reads it.
"""
