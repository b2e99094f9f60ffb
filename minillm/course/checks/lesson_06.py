"""Statistics of inputs, AWQ's search, one compensated weight, GPTQ.  Lesson 06."""

from . import Exercise

statistics = Exercise("MyStatistics")
awq = Exercise("awq_scales")
compensate = Exercise("compensate")
gptq = Exercise("gptq")
