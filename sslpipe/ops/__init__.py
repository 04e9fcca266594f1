"""What keeps a run's directory in order: its lock, its end markers, the wish to stop."""
