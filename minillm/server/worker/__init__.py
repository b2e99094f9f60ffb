"""HTTP workers: processes that read requests, tokenize prompts, and write responses, without torch.  Lesson 99."""
