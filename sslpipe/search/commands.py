"""The commands that this folder brings."""

COMMANDS = {
    "choose": (
        "sslpipe.search.cli.choose",
        "Rank pretrained weights on your images: sizes, joins and flattening.",
    ),
    "search": (
        "sslpipe.search.cli.search",
        "Show the images nearest to an image, in what `embed` has written.",
    ),
    "browse": (
        "sslpipe.search.cli.search",
        "Show the images of features on a map, in a page on this machine.",
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
