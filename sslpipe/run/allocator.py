"""Keep freed memory in the process: batches and activations are made where others were.

By default glibc gives blocks over 32 MB, and much that is smaller, back to the kernel when they are
freed, and the next ones are mapped and zeroed page by page. Without that, a ResNet-18 step in
float32 on a CPU took a sixth less time, and decoding a fifth less (benchmarks/step.py, loader.py).
"""

import os

from sslpipe.portable import c_function

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# bytes of a block; larger ones are mapped and returned as ever. Before 2.35 glibc refused more than
# half of what a thread's heap may hold.
_LARGEST_KEPT = (2**30, 2**25)


def keep_freed_memory() -> bool:
    """Ask this process's malloc to keep freed blocks; the process's size stays at its peak.

    Another malloc than glibc's and settings of the user (MALLOC_..., GLIBC_TUNABLES) stay as they
    are.

    Returns:
        Whether malloc agreed.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = c_function("mallopt")
    if mallopt is None or not any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST_KEPT):
        return False  # without the first setting the second does harm
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
