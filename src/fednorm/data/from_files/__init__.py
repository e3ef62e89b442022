"""Data in users' own files: a folder of images, a table, a numpy archive; each brings its clients or is dealt."""
