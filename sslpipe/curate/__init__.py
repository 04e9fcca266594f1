"""What is in a data set: duplicates, outliers, and which images are worth a label.

For whoever builds a data set or doubts a test: `duplicates.find_duplicates` finds images that are
one picture, `grouping.group` groups them, and `duplicate_files.write_column` writes the groups as
the column `duplicate_group`, which training and evaluation read. Start at `image_scan.py`, then
`duplicates.py`.
"""
