"""Is another vendor's drawing a better positive than another crop? The data and the table of it."""
