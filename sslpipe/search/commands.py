"""The commands that this folder brings."""

COMMANDS = {
    "choose": (
        "sslpipe.search.cli.choose",
        "Rank pretrained weights on your images, and joins of them.",
    ),
    "search": (
        "sslpipe.search.cli.search",
        "Show the images of a data set that are nearest to an image.",
    ),
    "browse": (
        "sslpipe.search.cli.search",
        "Show the images of features on a map, in a browser.",
    ),
    "gallery": (
        "sslpipe.search.cli.gallery",
        "Enrol, identify and verify: who is in this picture?",
    ),
}

NEXT = {
    "choose": "sslpipe export SOURCE --out FOLDER",
    "search": "sslpipe gallery enrol GALLERY.safetensors PHOTOS --model FOLDER",
    "browse": "sslpipe search FEATURES QUERY.jpg --model MODEL --data DIR/dataset.json",
    "gallery": "sslpipe gallery identify GALLERY.safetensors IMAGE --model FOLDER",
    "gallery enrol": "sslpipe gallery calibrate GALLERY.safetensors STRANGERS --model FOLDER",
}
