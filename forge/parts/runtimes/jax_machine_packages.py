"""What the JAX engine needs on a rented TPU machine: every package by its release, and the Python.

The set is closed: nothing is installed beside it. Knows no machine.
"""

from __future__ import annotations

# uv 0.13.9 resolved it on 2026-11-30 for Python 3.12 on x86-64 Linux with glibc 2.35 (Ubuntu
# 22.04), from jax[tpu] and the ranges that local-jax-cpu-2b names; libtpu is the release that
# jax[tpu] 0.10.2 asks for.
JAX_MACHINE_PYTHON = "3.12"
JAX_MACHINE_PACKAGES = (
    *("anyio==4.16.0", "certifi==2026.10.19.post1", "charset-normalizer==3.5.3", "click==8.5.1"),
    *("filelock==4.3.1", "fsspec==2026.9.0", "h11==0.16.0", "hf-xet==1.8.0", "httpcore2==2.16.2"),
    *("httpx2==2.16.2", "huggingface-hub==2.4.0", "idna==3.20", "jax==0.10.2", "jaxlib==0.10.2"),
    *("jinja2==3.1.6", "libtpu==0.0.42.1", "llguidance==1.9.1", "markupsafe==3.0.4"),
    *(
        "ml-dtypes==0.6.0",
        "numpy==2.5.5",
        "opt-einsum==3.4.0",
        "packaging==26.4",
        "prometheus-client==0.26.0",
    ),
    *("pyyaml==6.0.4", "requests==2.34.2", "scipy==1.18.1", "starlette==1.10.0"),
    *("tokenizers==0.23.3", "tqdm==4.70.1", "truststore==0.10.5", "typing-extensions==4.16.0"),
    *("urllib3==2.8.0", "uvicorn==0.54.0"),
)
