"""What the benchmarks share: arguments, figures, the machine, memory, processes, tables."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

MEASURED = Path(__file__).parents[1] / "docs" / "measured"
PACKAGES = ("torch", "torchvision", "kornia", "lightly", "pytorch-metric-learning", "pillow")


# --- arguments and results


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a program with this docstring; all write --json."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, help="write the figures there, too")
    return made


def save(path: Path | None, tree: Any) -> None:
    """Write figures as JSON; None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=1) + "\n")


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n{markdown_table(head, rows)}", flush=True)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a Markdown table."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def compare(name: str, now: Any, ratios: Callable[[Any], dict[str, float]]) -> None:
    """Print each ratio measured now, the one in the docs, and their quotient.

    Args:
        name: Of the file in docs/measured.
        now: What would be written there.
        ratios: Takes the ratios out of the content of such a file.
    """
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
    has, versions = torch.cpu.get_capabilities(), {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "commit": commit(),
        "cpu": models[0] if models else platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "amx_bf16": bool(has.get("amx_bf16")),
        "avx512_bf16": bool(has.get("avx512_bf16")),
        "threads": threads,
        "python": platform.python_version(),
        **versions,
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


def in_fresh_process(module: str, *words: object) -> Any:
    """Run `python -m MODULE WORDS` and return the JSON of its last line."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


class Contender:
    """A fresh process that measures when asked to, and otherwise waits."""

    def __init__(self, module: str, name: str, arguments: list[str], threads: int) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", "-m", module, "--one", name, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.ready = self._read()  # what it says when it has warmed up

    def times(self) -> list[float]:
        """Seconds of each call of one round."""
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        times: list[float] = json.loads(self._read())
        return times

    def close(self) -> None:
        """End it, by the end of its input, and wait for that."""
        self.process.communicate()

    def _read(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"{self.name} failed with {self.process.returncode}")
        return line


def in_turns(
    module: str, names: Iterable[str], arguments: list[str], *, threads: int, rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Measure contenders in turns: seconds of their calls by round, and what each said first."""
    with ExitStack() as stack:
        processes = []
        for name in names:
            processes.append(Contender(module, name, arguments, threads))
            stack.callback(processes[-1].close)
        times: dict[str, list[list[float]]] = {process.name: [] for process in processes}
        for _ in range(rounds):
            for process in processes:
                times[process.name].append(process.times())
    return times, {process.name: process.ready for process in processes}


def serve(
    call: Callable[[], Any],
    *,
    seconds: float,
    threads: int,
    device: str = "cpu",
    ready: str = "ready",
) -> None:
    """The contender's side: two calls to warm up, then a round for each line of stdin."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter
    for _ in range(2):
        call()
    print(ready, flush=True)
    for _ in sys.stdin:
        times: list[float] = []
        while not times or sum(times) < seconds:
            wait()
            start = clock()
            call()
            wait()
            times.append(clock() - start)
        print(json.dumps(times), flush=True)


def quietest(rounds: list[list[float]]) -> tuple[float, float]:
    """Seconds of the median call of the quietest round, and how much slower the median one was."""
    medians = sorted(statistics.median(times) for times in rounds)
    return medians[0], statistics.median(medians) / medians[0] - 1


def chosen(name: str, only: list[str] | None) -> bool:
    """Whether `only` holds the name, or its part before a comma or colon."""
    return not only or any(part in only for part in (name, *name.split(",", 1), *name.split(":")))
