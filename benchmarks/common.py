"""What the benchmarks share: arguments, figures, the machine, memory, processes, tables."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.wheels import installed

MEASURED = Path(__file__).parents[1] / "docs" / "measured"
PACKAGES = ("torch", "torchvision", "kornia", "lightly", "pytorch-metric-learning", "pillow")
Call = Callable[[], Any]


# --- arguments and results


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a program with this docstring; all write --json."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, help="write the figures there, too")
    return made


def timing_parser(doc: str | None, rounds: int, seconds: float) -> argparse.ArgumentParser:
    """Make the parser of a program that measures contenders in turns."""
    made = parser(doc)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seconds", type=float, default=seconds, help="a contender and round")
    return made


LINE = 200  # characters of JSON


def save(path: Path | None, tree: Any) -> None:
    """Write figures as JSON; None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one_row_a_figure(tree) + "\n")


def one_row_a_figure(tree: Any, indent: int = 0) -> str:
    """Write JSON with a line for each part that fits into LINE characters."""
    text = json.dumps(tree)
    if not isinstance(tree, dict | list) or len(text) <= LINE:
        return text
    if isinstance(tree, dict):
        parts = [
            f"{json.dumps(key)}: {one_row_a_figure(each, indent + 1)}" for key, each in tree.items()
        ]
    else:
        parts = [one_row_a_figure(each, indent + 1) for each in tree]
    pad = " " * (indent + 1)
    first, last = ("{", "}") if isinstance(tree, dict) else ("[", "]")
    return f"{first}\n{pad}" + f",\n{pad}".join(parts) + f"\n{' ' * indent}{last}"


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n{markdown_table(head, rows)}", flush=True)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a Markdown table."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def compare(name: str, now: Any, ratios: Callable[[Any], dict[str, float]]) -> None:
    """Print each ratio of `now`, the one of docs/measured/NAME, and their quotient."""
    documented = json.loads((MEASURED / name).read_text())
    then, machine = ratios(documented), documented["machine"]
    rows = [(key, ratio, then[key]) for key, ratio in ratios(now).items() if key in then]
    if rows:
        print(f"\nfaster than the peer: now, in the docs ({machine.get('cpu')}), quotient")
    for key, ratio, before in rows:
        print(f"{key:<60} {ratio:7.2f} {before:7.2f} {ratio / before:6.2f}")


# --- the machine


def machine(threads: int) -> dict[str, Any]:
    """Where and with what: the facts a number is worth nothing without."""
    models = _proc("cpuinfo", "model name")
    has = torch.cpu.get_capabilities()
    return {
        "commit": commit(),
        "cpu": models[0] if models else platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "amx_bf16": bool(has.get("amx_bf16")),
        "avx512_bf16": bool(has.get("avx512_bf16")),
        "threads": threads,
        "python": platform.python_version(),
        **{name: there for name in PACKAGES if (there := installed(name))},
    }


def commit() -> str:
    """Return the short name of the commit; "unknown" outside of a clone."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def machine_line(facts: dict[str, Any]) -> str:
    """Write the facts of `machine` as a sentence."""
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def absent(needs: dict[str, str]) -> list[str]:
    """Name the peers whose module is not installed (extra `bench`), and say so."""
    missing = [peer for peer, module in needs.items() if find_spec(module) is None]
    if missing:
        print(f"skipped, not installed (extra `bench`): {', '.join(missing)}", file=sys.stderr)
    return missing


# --- memory, as Linux counts it


def memory_mb(field: str) -> float:
    """A field of /proc/self/status in MB: VmRSS, or VmHWM for the peak.

    getrusage's peak is another number: it keeps, over exec, that of the process that started this.
    """
    return int(_proc("self/status", field)[0].split()[0]) / 1024


def machine_bytes() -> int:
    """Return the memory of the machine."""
    return int(_proc("meminfo", "MemTotal")[0].split()[0]) * 1024


def _proc(file: str, field: str) -> list[str]:
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() == field]


class Peak:
    """The peak of this process's memory from here on, over what it has now."""

    def __init__(self) -> None:
        self._before = memory_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here

    def extra_mb(self) -> float:
        """Return the MB that came on top until now."""
        return memory_mb("VmHWM") - self._before


# --- a fresh process for each contender


def sslpipe(*words: object) -> None:
    """Run the command line; what it prints is shown. Raises: CalledProcessError."""
    subprocess.run([sys.executable, "-m", "sslpipe", *map(str, words)], check=True)


def fresh_process() -> ProcessPoolExecutor:
    """Start a process that has computed nothing yet, and keeps what it is told to."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a fresh process."""
    with fresh_process() as process:
        return process.submit(function, *arguments).result()


def in_turns(
    prepare: Callable[..., tuple[Call, Any]],
    contenders: Mapping[str, tuple[Any, ...]],
    given: argparse.Namespace,
) -> tuple[dict[str, list[list[float]]], dict[str, Any]]:
    """Measure contenders in turns, each in a process that waits while another measures.

    `prepare` is called in a contender's process with its arguments, and gives what is timed, and
    what else is to be known of it; `given` is of `timing_parser`. Returns: name -> seconds of its
    calls by round; name -> what else is known.
    """
    threads, device = given.threads, getattr(given, "device", "cpu")
    os.environ.update(OMP_NUM_THREADS=str(threads), PYTHONWARNINGS="ignore")
    with ExitStack() as stack:
        processes = {name: stack.enter_context(fresh_process()) for name in contenders}
        known = {
            name: process.submit(_warm_up, threads, prepare, *contenders[name]).result()
            for name, process in processes.items()
        }
        times: dict[str, list[list[float]]] = {name: [] for name in contenders}
        for _ in range(given.rounds):
            for name, process in processes.items():
                times[name].append(process.submit(_round, given.seconds, threads, device).result())
    return times, known


_timed: list[Call] = []  # in a contender's process


def _warm_up(threads: int, prepare: Callable[..., tuple[Call, Any]], *arguments: Any) -> Any:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    call, known = prepare(*arguments)
    for _ in range(2):
        call()
    _timed.append(call)
    return known


def _round(seconds: float, threads: int, device: str) -> list[float]:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    times: list[float] = []
    while not times or sum(times) < seconds:
        wait()
        start = clock()
        _timed[0]()
        wait()
        times.append(clock() - start)
    return times


def quietest(rounds: list[list[float]]) -> tuple[float, float]:
    """Seconds of the median call of the quietest round, and how much slower the median one was."""
    medians = sorted(statistics.median(times) for times in rounds)
    return medians[0], statistics.median(medians) / medians[0] - 1


def chosen(name: str, only: list[str] | None) -> bool:
    """Whether `only` holds the name, or its part before a comma or colon."""
    return not only or any(part in only for part in (name, *name.split(",", 1), *name.split(":")))
