"""A part of each kind for sslpipe; pyproject.toml names them."""
