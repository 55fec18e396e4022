"""Settings of every test: one thread a process, no network."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `engines.run` makes the process of an engine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("KVLOOM_VLLM", None)
