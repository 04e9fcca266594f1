"""Shards in, batches of uint8 images out, in an order known in advance."""
