"""Unpack wheels beside a Python that has torch: no environment, no pip, no registry.

    python3 -m benchmarks.gpu.wheels out/gpu-wheels out/gpu-site
    PYTHONPATH=$PWD:out/gpu-site python3 -m benchmarks.gpu

What the Python has already, in a version that pyproject.toml takes, stays: its wheel is not
unpacked. Imports nothing but the standard library. Exit status 2 where something needed is absent.
"""

import argparse
import re
import shutil
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine

ROOT = Path(__file__).parents[2]
# dependencies that neither the tests marked gpu nor the benchmarks import, and what then is absent
OPTIONAL = {
    "wandb": "the tracker",
    "faiss-gpu": 'search = "faiss"',
    "faiss-cpu": 'search = "faiss"',
}
TESTING = ("pytest", "pytest-timeout")


def numbers(text: str) -> tuple[int, ...]:
    """(2, 15, 0) of "2.15.0+cu132": enough to compare releases."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lowest(requirement: str) -> tuple[str, str]:
    """("torch", "2.11") of "torch>=2.11"; what comes after a semicolon says where, not which."""
    name, _, least = requirement.partition(";")[0].partition(">=")
    return canonical(name.strip().partition("[")[0]), least.strip().partition(",")[0]


def required() -> dict[str, str]:
    """Every direct dependency and pytest: name -> lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = map(lowest, project["optional-dependencies"]["dev"])
    return dict(map(lowest, project["dependencies"])) | {n: v for n, v in tests if n in TESTING}


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def fits(wheel: str) -> bool:
    """Whether a wheel is for this Python: for any, for its stable interface or for this release."""
    python, abi, platform = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    own = f"cp3{sys.version_info.minor}"
    if abi == "none" and platform == "any":
        return "py3" in python.split(".")
    linux = "linux" in platform and sys.platform == "linux" and machine() in platform
    return linux and (own in python.split(".") or abi == "abi3")


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack into `site` what this Python lacks; one line for each wheel that is skipped."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    needs, skipped = required(), []
    for wheel in sorted(wheels.glob("*.whl")):
        name, its_version = wheel.name.split("-")[:2]
        there = installed(canonical(name))
        if there is not None and numbers(there) >= numbers(needs.get(canonical(name), "0")):
            skipped.append(f"skipped {name} {its_version}: {there} is there")
        elif not fits(wheel.name):
            skipped.append(
                f"skipped {wheel.name}: it is not for Python 3.{sys.version_info.minor}; "
                f"make gpu-wheels PYTHON_VERSION=3.{sys.version_info.minor}"
            )
        else:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
    return skipped


def missing() -> tuple[list[str], list[str]]:
    """What stops the benchmarks, then what they do without; call it with the site on sys.path."""
    stops, without = [], []
    for name, least in required().items():
        there = installed(name)
        if there is not None and numbers(there) >= numbers(least):
            continue
        said = f"{name} >= {least}" + (f" ({there} is there)" if there else "")
        if name not in OPTIONAL:
            stops.append(said)
        elif not (name.startswith("faiss") and (installed("faiss-gpu") or installed("faiss-cpu"))):
            without.append(f"without {said}: {OPTIONAL[name]} is not tried")
    return stops, without


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("site", type=Path)
    arguments = parser.parse_args()
    print("\n".join(unpack(arguments.wheels, arguments.site)), flush=True)
    sys.path.insert(0, str(arguments.site))
    stops, without = missing()
    print("\n".join(without))
    if stops:
        print(
            f"error: this Python lacks {', '.join(stops)}; put wheels of them into "
            f"{arguments.wheels}: make gpu-wheels, where there is a registry",
            file=sys.stderr,
        )
    return 2 if stops else 0


if __name__ == "__main__":
    sys.exit(main())
