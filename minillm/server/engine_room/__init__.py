"""The engine room: a page at / that shows the engine at work, and the numbers behind it.  Lesson 99."""
