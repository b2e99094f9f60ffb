"""Quantize a model: run it on calibration text, choose scales and codes, save it.  Lessons 05 to 07.

What looks at activations to choose scales, codes and rotations belongs here. How codes are stored (`quantization`) and
multiplied (`ops`) does not.
"""
