"""Batches of P classes with K images each, out of a stream of shards, planned on labels alone.

For fine-tuning, which needs positives in every batch. Start with `batches.PKOrder`, the plan of a
run, whose `ClassBuffer` keeps samples waiting for others of their class; `batches.pk_batches` reads
what the plan says.
"""
