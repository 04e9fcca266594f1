"""The Triton kernels in a process of their own, interpreted on a CPU or compiled for a card.

`python -m tests.helpers.triton_views CALLS`: functions below, their results by name as JSON.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def in_a_process(calls: dict[str, Any], **environment: str) -> Any:
    """Call functions of this module, each with a list of arguments, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.triton_views", json.dumps(calls)],
        env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def whole_views(presets: list[str], crop_px: int, sizes: list[list[int]], block: int) -> Any:
    """By preset: the largest difference to torch's operations, and the launches of a batch.

    In bfloat16 the views must be the rounded ones (the interpreter cuts bits off, a card rounds to
    the nearest); else that counts as a difference of 1.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from sslpipe.augment import triton_views
    from tests.augment.test_two_views import MEAN, STD

    launches, run = [], InterpretedFunction.run
    InterpretedFunction.run = lambda *given, **named: launches.append(1) or run(*given, **named)
    triton_views._BLOCK = block
    found = {}
    for preset in presets:
        torch_way, own = _both(crop_px, preset=preset, mean=MEAN, std=STD, normalize=False)
        batch = _batch(sizes)
        expected = torch_way(torch_way.prepare(batch, seed=0, number=0))
        batch = own.prepare(batch, seed=0, number=0)
        launches.clear()
        views = own(batch)
        count = len(launches)
        assert views.stride() == expected.stride()
        error = float((views - expected).abs().max())
        rounded = own(batch, dtype=torch.bfloat16).float()
        right = ((rounded - views).abs() <= 2**-7 * views.abs()).all()
        found[preset] = [error if right else 1.0, count]
    return found


def crops(side: int, sizes: list[list[int]]) -> float:
    """The largest difference of crops and flips alone."""
    return _difference(side, sizes, jitter_prob=0.0, grayscale_prob=0.0, blur_prob=0.0)


def blurs(side: int, sizes: list[list[int]]) -> float:
    """The largest difference where all views are blurred or solarized."""
    solarized = {"solarize_prob": [0.5, 0.8], "solarize_threshold": [0.5, 0.3]}
    blurred = {"blur_prob": [1.0, 0.2], "blur_sigma": [0.01, 3.0]}
    return _difference(side, sizes, jitter_prob=0.0, **blurred, **solarized)


def colours(side: int) -> float:
    """The largest difference of the colour ops in all orders, on the same cropped pixels."""
    orders = list(itertools.permutations(range(4)))
    torch_way, own = _both(side, blur_prob=0.0, flip_prob=0.0, normalize=False)
    batch = own.prepare(_batch([[side, side]] * (len(orders) // 2)), seed=2, number=0)
    drawn = batch.plan.draws
    changed = {
        "boxes": torch.tensor([[0, 0, side, side]] * len(orders)),
        "order": torch.tensor(orders),  # a view each
        "jitter": torch.ones(len(orders), dtype=torch.bool),
    }
    params = dataclasses.replace(drawn, params={**drawn.params, **changed})
    return float((own(batch, params) - torch_way(batch, params)).abs().max())


def _batch(sizes: list[list[int]]) -> Any:
    from tests.augment.test_two_views import batch_of

    return batch_of([(height, width) for height, width in sizes])


def _both(side: int, *, preset: str = "simclr", **settings: Any) -> Any:
    """Views by torch's operations and by Triton's kernels."""
    from sslpipe.augment.two_views import FusedViews

    return [FusedViews(preset, side, kernels=kind, **settings) for kind in ("torch", "triton")]


def bytes_moved(tables: Any, side: int, itemsize: int) -> int:
    """Bytes of images and views that the kernels read and write, each once a view and kernel."""
    pixels = 3 * side**2
    work, written = 4 * pixels, itemsize * pixels
    cropped = 3 * int((tables.boxes[:, 3] * tables.boxes[:, 4]).sum())  # bytes of the images
    views, blurred = len(tables.boxes), int((tables.blurred != 0).sum())
    ready = int((tables.blurred == 0).sum())  # when their colours are
    changed = int((tables.blurred == 1).sum())  # and then blurred
    colours = (ready + changed) * work + changed * work + ready * written
    return cropped + views * work + colours + blurred * (3 * work + written)


def moved(side: int, sizes: list[list[int]]) -> Any:
    """Bytes that the kernels load and store in the interpreter, and those of `bytes_moved`."""
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    places: dict[Any, list[Any]] = {}
    launches, run = [0], InterpretedFunction.run

    def launch(*given: Any, **named: Any) -> Any:
        launches[0] += 1
        return run(*given, **named)

    def noted(kind: str) -> Any:
        original = getattr(InterpreterBuilder, f"create_masked_{kind}")

        def call(self: Any, pointers: Any, *rest: Any) -> Any:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            mask = rest[0 if kind == "load" else 1]
            key = launches[0], self.grid_idx[0], kind, size
            places.setdefault(key, []).append(pointers.data[mask.data])
            return original(self, pointers, *rest)

        return call

    InterpretedFunction.run = launch
    for kind in ("load", "store"):
        setattr(InterpreterBuilder, f"create_masked_{kind}", noted(kind))
    _, augment = _both(side)
    batch = augment.prepare(_batch(sizes), seed=9, number=0)
    augment(batch, dtype=torch.bfloat16)
    counted = sum(key[3] * len(np.unique(np.concatenate(each))) for key, each in places.items())
    (tables,) = batch.plan.work.tables
    return counted, bytes_moved(tables, side, 2), tables.blurred.unique().tolist()


def compiled(capability: int) -> Any:
    """Compile every kernel for a card that is not there; the bytes of each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sslpipe.augment import triton_kernels

    constants = {"STEPS": 5, "BLOCK": 512, "PARTS": 128, "SOLARIZE": True}
    types = {"images": "*u8", "out": "*bf16", "side": "i32", "reach": "i32"}
    tables = dict.fromkeys(("boxes", "kinds", "contrast", "blurred"), "*i32")
    found = {}
    for name in ("crop", "rotate", "colour", "blur_down", "blur_across"):
        kernel = getattr(triton_kernels, f"{name}_kernel")
        known = {**types, **tables, **dict.fromkeys(constants, "constexpr")}
        signature = {
            arg: "i32" if arg.startswith("stride") else known.get(arg, "*fp32")
            for arg in kernel.arg_names
        }
        places = {(i,): constants[a] for i, a in enumerate(kernel.arg_names) if a in constants}
        binary = triton.compile(
            ASTSource(kernel, signature=signature, constexprs=places),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": True},
        )
        assert f"sm_{capability}" in binary.asm["ptx"]
        found[name] = len(binary.asm["cubin"])
    return found


def _difference(side: int, sizes: list[list[int]], **settings: Any) -> float:
    torch_way, own = _both(side, normalize=False, **settings)
    batch = _batch(sizes)
    ours, theirs = (a(a.prepare(batch, seed=1, number=0)) for a in (own, torch_way))
    # a value within rounding of a threshold may be inverted by one of the two only
    inverted = (ours + theirs - 1).abs() < 1e-5
    thresholds = {spec.solarize_threshold for spec in own.specs}
    at_edge = [(torch.minimum(ours, theirs) - min(t, 1 - t)).abs() < 1e-5 for t in thresholds]
    counted = ~(inverted & torch.stack(at_edge).any(0))
    assert counted.double().mean() > 0.999
    return float((ours - theirs)[counted].abs().max())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: globals()[name](*a) for name, a in json.loads(sys.argv[1]).items()}))
