"""What is in a data set: duplicates, outliers, and which images are worth a label.

For whoever builds a data set or doubts a test: `duplicates.find_duplicates` finds images that are
one picture, in a split and across splits, and `results.write_results` writes them down as groups,
among other places in the column `duplicate_group`, which training and evaluation read. Start
reading at `scan.py`, which reads each image once, then `duplicates.py`.
"""
