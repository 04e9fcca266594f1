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
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# dependencies that neither the tests marked gpu nor the benchmarks import, and what then is absent
OPTIONAL = {"wandb": "the tracker", "faiss-gpu": 'search = "faiss"'}
TESTING = ("pytest", "pytest-timeout")


def numbers(text: str) -> tuple[int, ...]:
    """(2, 15, 0) of "2.15.0+cu132": enough to compare releases."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Needed(NamedTuple):
    """A version: this one or a later one, or where `exact` no other."""

    version: str
    exact: bool = False

    def __str__(self) -> str:
        return f"{'==' if self.exact else '>='} {self.version}"

    def met_by(self, there: str) -> bool:
        if self.exact:
            return numbers(there) == numbers(self.version)
        return numbers(there) >= numbers(self.version)


def parse(requirement: str) -> tuple[str, Needed]:
    """("torch", >= 2.11) of "torch>=2.11; python_version > '3'": markers and extras are dropped."""
    wanted = requirement.partition(";")[0]
    name = re.match(r"[\w.-]+", wanted)
    bound = re.search(r"(>=|==)\s*([\w.+]+)", wanted)
    assert name is not None
    needed = Needed(bound[2], bound[1] == "==") if bound else Needed("0")
    return canonical(name[0]), needed


def required() -> dict[str, Needed]:
    """Every direct dependency and pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    elsewhere = "platform_system != 'Linux'"  # the wheels are for Linux on x86-64
    direct = [one for one in project["dependencies"] if elsewhere not in one]
    tests = map(parse, project["optional-dependencies"]["dev"])
    return dict(map(parse, direct)) | {name: needed for name, needed in tests if name in TESTING}


def requirements(wheel: Path) -> dict[str, Needed]:
    """What a wheel itself needs, without its extras."""
    with zipfile.ZipFile(wheel) as file:
        metadata = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(file.read(metadata)).get_all("Requires-Dist", [])
    return dict(parse(line) for line in lines if "extra ==" not in line)


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
    named = {canonical(path.name.split("-")[0]): path for path in sorted(wheels.glob("*.whl"))}
    needs, chosen = {name: [needed] for name, needed in required().items()}, set[str]()
    # what is chosen may need a later version of what is there: again, until nothing is added
    while added := {
        name
        for name in named.keys() - chosen
        if (there := installed(name)) is None
        or not all(needed.met_by(there) for needed in needs.get(name, []))
    }:
        chosen |= added
        for name in added:
            for other, needed in requirements(named[name]).items():
                needs.setdefault(other, []).append(needed)
    skipped = []
    for name, wheel in named.items():
        if name not in chosen:
            skipped.append(f"skipped {wheel.name}: {name} {installed(name)} is there")
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
    for name, needed in required().items():
        there = installed(name)
        if there is not None and needed.met_by(there):
            continue
        said = f"{name} {needed}" + (f" ({there} is there)" if there else "")
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
