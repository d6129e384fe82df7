"""What `nanocp bench serve` offers, by name; the command's options list it without importing it.

Enters: nothing. Leaves: tuples of words. Does not know: what they stand for.
"""

BACKENDS = ("openai", "openai-chat", "vllm", "grpc")
"""`vllm` is `openai`, under the name that users of vLLM know."""
DATASETS = ("random", "sharegpt", "mooncake", "azure")
TRACES = ("mooncake", "azure")
"""Datasets whose requests have times of their own."""
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
"""--percentile-metrics: (short name, header)."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Metrics that --goodput may bound."""
