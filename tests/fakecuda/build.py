"""Build the stub libraries of one torch: what the sources beside this file write, and a function
that returns 0 for every other symbol of the real library.
"""

import functools
import glob
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("build.py", "cudart.cpp", "nccl.cpp", "libraries.c")
# name -> (a part of the folder under site-packages/nvidia, pattern of the file, own symbols)
LIBRARIES = {
    "cudart": ("cu*", "libcudart.so.*", "(__)?cuda"),
    "cublas": ("cu*", "libcublas.so.*", "cublas"),
    "cublaslt": ("cu*", "libcublasLt.so.*", "cublasLt"),
    "cudnn": ("cudnn", "libcudnn.so.*", "cudnn"),
    "cusolver": ("cu*", "libcusolver.so.*", "cusolver"),
    "nvrtc": ("cu*", "libnvrtc.so.*", "nvrtc"),
    "nccl": ("nccl", "libnccl.so.*", "p?nccl"),
}
PRELOADED = tuple(LIBRARIES)  # all but libcuda, which torch opens by its name


class CannotBuildError(Exception):
    """Why this machine cannot build the stubs, in one line."""


@functools.cache
def stub_folder() -> Path:
    """The folder of the stubs, built once for this torch and these sources; seconds.

    Raises: CannotBuildError, with what is missing.
    """
    if torch.version.cuda is None or not torch.version.cuda.startswith("13."):
        raise CannotBuildError(f"needs torch for CUDA 13, this one is for {torch.version.cuda}")
    for tool in ("g++", "gcc", "nm"):
        if not shutil.which(tool):
            raise CannotBuildError(f"needs {tool}")
    key = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for name in SOURCES:
        key.update((HERE / name).read_bytes())
    folder = Path(tempfile.gettempdir()) / f"fakecuda-{os.getuid()}-{key.hexdigest()[:16]}"
    if not folder.is_dir():
        # several test processes may build at once: the first whole folder counts
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fakecuda-build-") as work:
            _build(Path(work))
            try:
                Path(work).rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
            else:
                Path(work).mkdir()  # for TemporaryDirectory to remove
    return folder


def preload(folder: Path) -> dict[str, str]:
    """The environment in which a process loads the stubs instead of the real libraries."""
    names = [_real(key).name for key in PRELOADED]
    return {
        "LD_PRELOAD": " ".join(str(folder / name) for name in names),
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
    }


def _real(key: str) -> Path:
    part, pattern, _ = LIBRARIES[key]
    nvidia = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted(nvidia.glob(f"{part}/lib/{pattern}"))
    if not found:
        raise CannotBuildError(f"needs {nvidia}/{part}/lib/{pattern}, which torch brings")
    return found[0]


def _include() -> list[str]:
    """Folders of headers: torch's packages have all but crt/host_config.h, a toolkit has that."""
    roots = [os.environ.get("CUDA_HOME"), *sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    own = _real("cudart").parents[1]
    folders = [f"{root}/include" for root in roots if root] + [str(own / "include")]
    if not any(Path(folder, "crt/host_config.h").is_file() for folder in folders):
        raise CannotBuildError("needs the headers of a CUDA toolkit (crt/host_config.h)")
    folders.append(str(_real("nccl").parents[1] / "include"))
    return [f"-I{folder}" for folder in folders]


def _build(out: Path) -> None:
    include = _include()
    for key in LIBRARIES:
        real = _real(key)
        exported = _symbols("-D", str(real), own=LIBRARIES[key][2])
        _library(out, key, real.name, exported, include)
    header = (_real("cudart").parents[1] / "include/cuda.h").read_text(errors="replace")
    driver = set(re.findall(r"CUDAAPI\s+(cu\w+)", header))
    driver |= set(re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d+)\b", header))
    _library(out, "cuda", "libcuda.so.1", driver, include)


def _library(out: Path, key: str, soname: str, exported: set[str], include: list[str]) -> None:
    """Compile what is written, and a function that returns 0 for each other exported name."""
    cpp = HERE / f"{key}.cpp"
    source = str(cpp if cpp.is_file() else HERE / "libraries.c")
    define = f"-D{key.upper()}={_cudnn_version() if key == 'cudnn' else 1}"
    words = ["g++", "-std=c++17"] if cpp.is_file() else ["gcc"]
    written = str(out / f"{key}.o")
    _run(*words, "-O1", "-fPIC", "-w", define, *include, "-c", source, "-o", written)
    rest = sorted(exported - _symbols(written))
    stubs, names = out / f"{key}_rest.c", out / f"{key}.map"
    stubs.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in rest))
    names.write_text(f"{soname} {{ global: *; }};\n")
    link = [] if key == "cudart" else [f"-L{out}", f"-l:{_real('cudart').name}"]
    shared = ["gcc", "-w", "-shared", "-fPIC", "-o", str(out / soname), written, str(stubs)]
    version = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={names}", "-Wl,-rpath,$ORIGIN"]
    _run(*shared, *version, *link, "-lstdc++", "-ldl", "-lrt")


def _symbols(*words: str, own: str = "") -> set[str]:
    lines = _run("nm", "--defined-only", *words).splitlines()
    names = {re.sub("@.*", "", line.split()[-1]) for line in lines if re.search(" [TWt] ", line)}
    return {name for name in names if re.match(own, name)}


def _cudnn_version() -> int:
    text = (_real("cudnn").parents[1] / "include/cudnn_version.h").read_text()
    parts = [
        re.search(rf"#define CUDNN_{w}\s+(\d+)", text) for w in ("MAJOR", "MINOR", "PATCHLEVEL")
    ]
    major, minor, patch = (int(part[1]) for part in parts if part)
    return 10000 * major + 100 * minor + patch


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(f"{words[0]} failed: {done.stderr.strip()[:300]}")
    return done.stdout
