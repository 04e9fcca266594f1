"""Labelled fine-tuning after pretraining: losses, heads, miners, batches with K images a class."""
