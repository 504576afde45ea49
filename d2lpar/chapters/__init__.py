"""Code of single chapters: a module or a folder for each, under the name of the chapter."""
