"""Names that `nanocp bench serve` offers; options list them without heavy imports."""

BACKENDS = ("openai", "openai-chat", "vllm", "grpc")
"""`vllm` is `openai`."""
DATASETS = ("random", "sharegpt", "custom", "prefix_repetition", "mooncake", "azure")
OTHER_DATASETS = {
    "sonnet": "give random with --random-prefix-len, or custom with a file of prompts",
    "burstgpt": "give azure, whose lines are times and lengths too",
    "hf": "write its prompts into a file for custom, one JSON object with a prompt a line",
    "custom_mm": "only text is served; give custom",
    "random-mm": "only text is served; give random",
    "random-rerank": "nothing ranks here; give random",
    "spec_bench": "write its prompts into a file for custom",
}
"""Unsupported datasets of `vllm bench serve`, and their replacements."""
GO_ON = ("random", "prefix_repetition")
"""Datasets of random prompts: outputs ignore the end of sequence."""
TRACES = ("mooncake", "azure")
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
