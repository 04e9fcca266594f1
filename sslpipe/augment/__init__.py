"""uint8 images in, two views out; all randomness a function of (seed, epoch, id, view)."""
