"""One engine on several GPUs: a process for each, which holds a shard of the model.

Collectives, the ranks' processes, and the executor that sends them the engine's steps belong here. What a shard is, and
which numbers shards exchange (`model`), does not.
"""
