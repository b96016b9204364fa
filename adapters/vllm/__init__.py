"""The guard inside vLLM: a plugin, a scheduler side that keeps the books, a worker side that checks.

Nothing here imports vLLM at module level: the plugin is loaded in processes that never run a scheduler or a model.
"""
