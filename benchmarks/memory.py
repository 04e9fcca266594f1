"""This process's memory as Linux counts it."""

from pathlib import Path


def memory_mb(field: str) -> float:
    """A field of /proc/self/status in MB: VmRSS, or VmHWM for the peak.

    getrusage's peak is another number: it keeps, over exec, that of the process that started this.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(field)
