"""Do label-free scores find the better checkpoint? The data sets, the runs and the table of it."""
