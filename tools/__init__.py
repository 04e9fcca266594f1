"""Programs over files, run as `python -m tools.NAME`; the library never imports them."""
