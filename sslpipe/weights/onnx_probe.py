"""Run an ONNX file once, on a black image, with a limit of memory.

Run as a program of its own, without the rest of this package:
python onnx_probe.py FILE INPUT OUTPUT BATCH SIDE MOST_BYTES prints the output's type and shape as
JSON. A file that asks for too much ends this process, and no other.
"""

import json
import sys


def main(file: str, given: str, wanted: str, batch: str, side: str, most_bytes: str) -> None:
    """Compute one batch and print what came out."""
    import numpy as np
    import onnxruntime

    try:
        import resource
    except ImportError:  # Windows has no such limits
        pass
    else:
        most = int(most_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # each thread takes memory of its own
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    image = np.zeros((int(batch), 3, int(side), int(side)), np.float32)
    (output,) = session.run([wanted], {given: image})
    print(json.dumps([str(output.dtype), list(output.shape)]))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are none of what is imported here
    try:
        main(*sys.argv[1:])
    except MemoryError:
        sys.exit("it asks for too much memory")
    except Exception as error:  # onnxruntime's have no common base
        sys.exit(" ".join(str(error).split())[-300:])
