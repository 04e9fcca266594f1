"""Ours against the peers. A package, as pyarrow 17 installs one of this name, which would win."""
