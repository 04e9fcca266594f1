"""`python -m tools.NAME` is `sslpipe NAME`, run from a clone that is not installed."""
