"""Methods that choose codes and scales from calibration data: one file each, without a model.  Lessons 06 and 07.

The arithmetic of one weight and of its inputs' statistics belongs here. Running a model on text for these statistics,
and which weights get which method (`calibration`), does not.
"""
