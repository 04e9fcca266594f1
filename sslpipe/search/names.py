"""What of this folder is `sslpipe.NAME`, too."""

NAMES = {
    "Gallery": "sslpipe.search.gallery",
    "ImageSearch": "sslpipe.search.images",
    "browse": "sslpipe.search.browse",
    "choose": "sslpipe.search.choice",
    "rank_features": "sslpipe.search.choice",
}
