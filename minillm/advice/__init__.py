"""What fits, what is fast, and which precision to choose: estimates, without running a model.  Lesson 08.

Estimates and recommendations belong here. Measuring does not (`tuning`, `bench`), and nothing here changes an engine.
"""
