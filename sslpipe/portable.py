"""What differs between Linux and macOS, one function each, and files written whole."""

import ctypes
import errno
import fcntl
import hashlib
import importlib
import os
import re
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

PROC = Path("/proc")  # Linux's view of the machine and of every process
CGROUPS = Path("/sys/fs/cgroup")  # and of the limits that containers and batch systems set


def _numbers(names: str) -> tuple[int, ...]:
    """Return the error numbers of these names; not every system has them all."""
    return tuple(getattr(errno, name) for name in names.split() if hasattr(errno, name))


_FULL = _numbers("ENOSPC EDQUOT")
_FAILING = _numbers(
    "EIO ESTALE ENOTCONN ETIMEDOUT EREMOTEIO ENODEV ENXIO EHOSTDOWN ENETDOWN ENETUNREACH"
)
_NOT_OF_FOLDERS = _numbers("EINVAL EBADF ENOTSUP EOPNOTSUPP ENOSYS")  # fsync, on some disks
_OF_THE_DISK = (*_FULL, errno.EFBIG, *_FAILING)
_REMEDIES = {  # error number -> what to do
    **dict.fromkeys(_FULL, "free some space"),
    errno.EFBIG: "the file system, or `ulimit -f`, allows no file so large",
    **dict.fromkeys(
        _FAILING, "the disk or its network failed; run the same command again when it works"
    ),
    **dict.fromkeys(
        _numbers("EROFS EACCES EPERM"), "name another place, or change its permissions"
    ),
    **dict.fromkeys(
        _numbers("ENOLCK EOPNOTSUPP"),
        "its file system has no locks; mount it with some (NFS: a lock daemon, Lustre: -o flock), "
        "or use another disk",
    ),
    errno.ENOENT: "it, or its folder, is not there (any more)",
    **dict.fromkeys(_numbers("EMFILE ENFILE"), "too many files are open; raise `ulimit -n`"),
    **dict.fromkeys(_numbers("EISDIR ENOTDIR EEXIST ENAMETOOLONG EBUSY ENOTEMPTY ELOOP"), ""),
}

_LESS_MEMORY = (
    "end other programs, or ask for less at once: --batch-size, --num-workers, data.batch_size, "
    "data.micro_batch"
)
_NO_MEMORY = (
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "allocate memory",
    "failed to map segment",
)


@contextmanager
def replacing(path: Path, *, fsync: bool = False, sweep: bool = True) -> Iterator[Path]:
    """Give a temporary file to write to; on leaving it becomes `path`, whole or not at all.

    If the block raises, `path` is as it was and nothing is left beside it. Of several writers the
    last to finish counts.

    Args:
        path: The file to write; its folder must exist.
        fsync: Put the bytes and the rename on disk before returning, to survive a power cut.
        sweep: Remove what killed writers left; not for folders of very many files.
    """
    if sweep:
        remove_abandoned(path.parent, path.name)
    writer = f"{_host()}-{os.getpid()}-{process_start()}"
    temporary = path.with_name(f".{path.name}.{writer}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        yield temporary
        if stat.S_IMODE(os.lstat(temporary).st_mode) == 0o600 != mode:  # safetensors made it anew
            os.chmod(temporary, mode)
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # a folder that is gone or read-only: the first error counts
            temporary.unlink(missing_ok=True)
        failed = disk_error(error)
        if failed is None or str(failed.filename) not in ("None", str(temporary)):
            raise
        # the system names no file, or the temporary one
        raise OSError(failed.errno, failed.strerror, str(path)) from error
    if fsync:
        sync(path.parent)


def disk_error(error: BaseException) -> OSError | None:
    """Return the error of a full or failing disk that an error is, or comes from; None: none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OF_THE_DISK:
            return cause
        match = re.search(r"\(os error (\d+)\)", str(cause))  # of safetensors, written in Rust
        if match and int(match[1]) in _OF_THE_DISK:
            return OSError(int(match[1]), os.strerror(int(match[1])))
        cause = cause.__cause__ or cause.__context__
    return None


def file_error(error: BaseException) -> OSError | None:
    """Return the error of a file, or of a disk, that an error is; None where it is neither."""
    of_a_file = isinstance(error, OSError) and (
        error.filename is not None or error.errno in _REMEDIES
    )
    return error if of_a_file else disk_error(error)  # type: ignore[return-value]


def explain_file_error(error: OSError, path: str | Path | None = None) -> str:
    """Return in one line which file failed, why, in the system's words, and what to do.

    Args:
        error: As `file_error` returns it.
        path: Of the file, where the error does not know it.
    """
    path = path or error.filename2 or error.filename or "a file"
    remedy = _REMEDIES.get(error.errno or 0, "")
    reason = error.strerror or type(error).__name__
    return f"cannot use {os.fsdecode(path)}: {reason}" + (f"; {remedy}" if remedy else "")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error is one of too little memory, of Python, of torch or of C++."""
    may_be = isinstance(error, RuntimeError | OSError | SystemError | ImportError)
    return isinstance(error, MemoryError) or (
        may_be and any(words in str(error).lower() for words in _NO_MEMORY)
    )


def memory_is_short(error: BaseException) -> bool:
    """Return whether memory is short for what this machine could hold, were it all free."""
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    return lacks_memory(error) and (asked is None or int(asked[1]) <= total_memory_bytes())


def explain_lack_of_memory(error: BaseException) -> str | None:
    """Return in one line that memory is short, and what to change; None: the error is another."""
    if not lacks_memory(error):
        return None
    reason = " ".join(str(error).split())[:300].partition(" Exception raised from")[0]
    return f"not enough memory ({reason or type(error).__name__}); {_LESS_MEMORY}"


def remove_abandoned(folder: Path, target: str | None = None) -> None:
    """Remove temporary files whose writers, on this machine, are gone; of one file, or of all."""
    file = r"\..+" if target is None else rf"\.{re.escape(target)}"
    ours = re.compile(rf"{file}\.{_host()}-(\d+)-([\w.]+)\.[0-9a-f]{{16}}\.tmp", re.DOTALL)
    with suppress(OSError):
        for name in os.listdir(folder):
            match = ours.fullmatch(name) if name.endswith(".tmp") else None
            if match is not None and process_start(int(match[1])) != match[2]:
                (folder / name).unlink(missing_ok=True)


@cache
def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def write_atomically(
    path: Path, content: bytes | str, *, fsync: bool = False, sweep: bool = True
) -> None:
    """Write bytes, or text as UTF-8, whole or not at all; arguments as in `replacing`."""
    with replacing(path, fsync=fsync, sweep=sweep) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def open_regular(
    path: str | Path, most_bytes: int | None = None, *, pipe: bool = False
) -> BufferedReader:
    """Open a file that somebody else made, to read; never waits for a FIFO or reads a device.

    Args:
        path: Also a link to a regular file.
        most_bytes: The largest size; None: any.
        pipe: Also take a pipe, as a shell's `<(command)`: for a path that the user typed.
    """
    if pipe and re.fullmatch(r"/(dev|proc/self)/fd/\d+", str(path)) and Path(path).is_fifo():
        return os.fdopen(os.open(path, os.O_RDONLY), "rb")  # its writer is there, or has ended
    # a FIFO or a device would hang for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    number = errno.EINVAL
    if stat.S_ISREG(status.st_mode):
        if most_bytes is None or status.st_size <= most_bytes:
            return os.fdopen(descriptor, "rb")
        text = f"it has {status.st_size:,} bytes, and at most {most_bytes:,} are read"
    elif stat.S_ISDIR(status.st_mode):
        number = errno.EISDIR  # which makes it an IsADirectoryError
        text = os.strerror(errno.EISDIR)
    else:
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "no regular file")
        text = f"it is {what}, not a regular file"
    os.close(descriptor)
    raise OSError(number, text, str(path))


def read_regular(path: str | Path, most_bytes: int | None = None) -> bytes:
    """Read all of a file that somebody else made; see `open_regular`."""
    with open_regular(path, most_bytes) as file:
        return file.read()


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def one_at_a_time(folder: Path, say: Callable[[str], None] = _print_to_stderr) -> Iterator[None]:
    """Let one process at a time be inside, of all that name this folder here; others wait.

    `say` gets a line that this one waits. On a network without such locks none does. A folder that
    is not there is made; where the block raises before it has written there, it goes again.
    """
    is_new = not folder.exists()
    descriptor = _locked(folder, say)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it is empty no more
            if is_new:
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)  # which unlocks


def _locked(folder: Path, say: Callable[[str], None]) -> int:
    """Open a folder, made where it is not there, and lock it, where the file system has locks."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # the file system has none
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process writes in {folder}: waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)  # who held it was refused, and has removed it


def sync(path: Path) -> None:
    """Put a file's bytes, or the renames in a folder, on disk; of a folder, where that can be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # SMB, 9p and FUSE: they have it for files alone
        if not (path.is_dir() and error.errno in _NOT_OF_FOLDERS):
            raise
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Compute a file's sha256 in hexadecimal, without holding it in memory."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_lines(folder: Path, files: Iterable[Path]) -> str:
    """Return lines of `sha256sum` for files under a folder."""
    lines = (f"{sha256_of(file)}  {file.relative_to(folder).as_posix()}\n" for file in files)
    return "".join(lines)


def gib(count: float) -> str:
    """Write a number of bytes, as "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


def free_memory_bytes() -> int:
    """Bytes of memory that this process can still have without swapping, under all limits."""
    free = int(_psutil().virtual_memory().available)
    return max(0, min([free, *(limit - used for limit, used in _cgroup_limits())]))


def resident_bytes() -> int:
    """Bytes of memory that this process has now."""
    return int(_psutil().Process().memory_info().rss)


def total_memory_bytes() -> int:
    """Bytes of memory and swap that this process could have if it were alone."""
    memory = int(_psutil().virtual_memory().total)
    limits = (limit for limit, _ in _cgroup_limits())
    return min([memory, *limits]) + int(_psutil().swap_memory().total)


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use in bytes of each control group that this process is in, outer ones too."""
    # Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            root = CGROUPS
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group_folder = root / group.strip("/")
        for folder in (group_folder, *group_folder.parents):
            limits += _cgroup_limit(folder, names)
            if folder == root:
                break
    return limits


def _cgroup_limit(folder: Path, names: tuple[str, str, str]) -> list[tuple[int, int]]:
    """Read limit and use, in bytes, by the names of their files and of a line of memory.stat."""
    most, used, cached = names
    try:
        limit, use = ((folder / name).read_text(encoding="ascii").strip() for name in (most, used))
        fields = (folder / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return []  # a root has no limit; of a container's outer groups nothing is seen
    if limit == "max":
        return []
    stat = dict(zip(fields[::2], fields[1::2], strict=True))
    return [(int(limit), int(use) - int(stat.get(cached, 0)))]  # files' pages are given back


def process_start(pid: int | None = None) -> str | None:
    """Return when a process (default: this one) started; None where there is no such process.

    It tells a process from a later one with the same number: compare for equality, on one machine.
    """
    pid = pid or os.getpid()
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]
    except OSError:
        if (PROC / "self").is_dir():
            return None
    psutil = _psutil()
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def command_of(pid: int) -> str | None:
    """Read a process's command line; None where it is gone or may not be read."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return None
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def stop_signals() -> tuple[signal.Signals, ...]:
    """List the signals that ask a run to save and end.

    Signals that a program may use for itself (timers, SIGUSR2) are included where nothing handles
    them: they would end the process unsaved. SIGHUP is not, where `nohup` had it ignored.
    """
    names = ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT"]
    if ignores_hang_up():
        names.remove("SIGHUP")
    for name in ("SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGXCPU", "SIGPWR"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:
            names.append(name)
    return tuple(signal.Signals[name] for name in names)


def ignores_hang_up() -> bool:
    """Return whether this process outlives its terminal, as one that `nohup` started does."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep freed blocks: batches and activations are made where others were.

    By default it gives blocks over 32 MB back to the kernel, and the next ones are zeroed page by
    page: a sixth of a ResNet-18 step on a CPU, a fifth of decoding (benchmarks/step.py, loader.py).
    The process's size stays at its peak. False where malloc is another one, or the user has
    settings of it.
    """
    malloc = _glibc_malloc()
    trim_threshold = -1
    # bytes of a block, larger ones are mapped as ever; before 2.35 glibc refused more than 2**25
    if malloc is None or not any(malloc.mallopt(_MMAP, size) for size in (2**30, 2**25)):
        return False  # without the first setting the second does harm
    return bool(malloc.mallopt(trim_threshold, 2**31 - 1))


def return_freed_memory() -> bool:
    """Have glibc's malloc give the kernel what is free now, and from here on each block of 4 MB.

    For a stage that does not use the memory of the one before: `sslpipe choose` of 5,000 images
    peaked at 1.7 GB with it, at 2.1 GB without. False as for `keep_freed_memory`.
    """
    if (malloc := _glibc_malloc()) is None or not malloc.mallopt(_MMAP, 2**22):
        return False
    malloc.malloc_trim(0)
    return True


_MMAP = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def _glibc_malloc() -> Any:
    """Return the C library where it is glibc and the user has set nothing of its malloc."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _psutil() -> Any:
    return importlib.import_module("psutil")  # accelerate brings it
