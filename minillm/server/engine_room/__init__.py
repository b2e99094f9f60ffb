"""The engine room: a page at / that shows the engine at work, and the numbers behind it.  Lesson 99.

The page's files, and the numbers in the form in which it shows them, belong here. Who may ask for the numbers does not
(`worker`), and neither do counting and measuring (`engine_side`).
"""
