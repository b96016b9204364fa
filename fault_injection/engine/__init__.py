"""The embedded engine: a small paged LLM engine in PyTorch, the default target of fault campaigns."""
