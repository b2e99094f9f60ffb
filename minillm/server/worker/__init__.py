"""HTTP workers: processes that read requests, tokenize prompts, and write responses, without torch.  Lesson 99.

HTTP, and the formats of requests and responses, belong here. What runs next to the engine (`engine_side`) does not, and
neither does replacing processes that end (`supervisor`).
"""
