"""Does continuing from ImageNet weights help on drawings? The data and the table of it."""
