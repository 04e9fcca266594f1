"""Unpack wheels beside a Python that has torch: no environment, no pip, no registry.

    python3 -m benchmarks.gpu.wheels out/gpu-wheels out/gpu-site
    PYTHONPATH=$PWD:out/gpu-site python3 -m benchmarks.gpu

`make gpu-wheels` chose the wheels together, so all are unpacked, before what the Python has itself.
Imports nothing but the standard library. Exit status 2 where something needed is absent.
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
OPTIONAL = {"faiss-gpu": "search by faiss", "wandb": "the tracker"}
TESTING = ("pytest", "pytest-timeout")


def numbers(text: str) -> tuple[int, ...]:
    """(2, 15, 0) of "2.15.0+cu132": enough to compare releases."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def required() -> dict[str, str]:
    """Name -> ">=2.11" or "==1.0" of every direct dependency and pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    elsewhere = "platform_system != 'Linux'"  # the wheels are for Linux on x86-64
    wanted = [one for one in project["dependencies"] if elsewhere not in one]
    tests = project["optional-dependencies"]["dev"]
    wanted += [one for one in tests if re.split(r"[^\w-]", one)[0] in TESTING]
    found = {}
    for one in wanted:
        name, bound = re.match(r"([\w.-]+)[^;=<>]*((?:>=|==)\s*[\w.+]+)?", one).groups()
        found[re.sub("[-_.]+", "-", name).lower()] = bound or ">=0"
    return found


def met(bound: str, there: str) -> bool:
    """Whether a version is within ">=..." or "==..."."""
    wanted = numbers(bound[2:].strip())
    return numbers(there) == wanted if bound.startswith("==") else numbers(there) >= wanted


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
    """Unpack into `site`; one line for each wheel that is not for this Python."""
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    skipped, release = [], f"3.{sys.version_info.minor}"
    for wheel in sorted(wheels.glob("*.whl")):
        if fits(wheel.name):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
        else:
            remedy = f"make gpu-wheels PYTHON_VERSION={release}"
            skipped.append(f"skipped {wheel.name}: it is not for Python {release}; {remedy}")
    return skipped


def missing() -> tuple[list[str], list[str]]:
    """What stops the benchmarks, then what they do without; call it with the site on sys.path."""
    stops, without = [], []
    for name, bound in required().items():
        there = installed(name)
        if there is not None and met(bound, there):
            continue
        said = f"{name}{bound}" + (f" ({there} is there)" if there else "")
        if name not in OPTIONAL:
            stops.append(said)
        else:
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
            f"error: this Python lacks {', '.join(stops)}; put their wheels into "
            f"{arguments.wheels} (make gpu-wheels downloads the small ones)",
            file=sys.stderr,
        )
    return 2 if stops else 0


if __name__ == "__main__":
    sys.exit(main())
