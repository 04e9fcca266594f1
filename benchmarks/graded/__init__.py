"""Nine kinds of images from near to far of photographs, and what features are worth on each."""
