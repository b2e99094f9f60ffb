"""The server's part in the engine's process: it passes requests to the engine, and their tokens back.  Lesson 99.

What the server runs next to the engine belongs here: its sockets, limits and measurements. HTTP (`worker`) does not,
and neither does choosing what runs in a step (`scheduler`).
"""
