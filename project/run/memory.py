"""How this process keeps memory for tensors on the CPU."""

import ctypes

# Of mallopt(3), in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
BYTES_TO_KEEP = 2**31 - 1  # mallopt takes a C int


def keep_freed_memory() -> bool:
    """Have the C library keep the memory that tensors free, for the next ones, instead of returning it to the system.

    By default it maps every large tensor anew, and the system fills each with zeros page by page: a fifth of the time of a
    training step with large activations. Torch has no allocator of its own on the CPU.

    Returns:
        Whether the C library has taken it: glibc's does; others are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, BYTES_TO_KEEP))
