"""The command that this folder brings."""

COMMANDS = {
    "sensors": (
        "sslpipe.sensors.cli",
        "Convert TIFF, DICOM, NIfTI, arrays and large scenes to shards.",
    ),
}

NEXT = {
    "sensors": "sslpipe shards show DIR --out samples.png, then "
    "sslpipe check RECIPE --data DIR/dataset.json",
}
