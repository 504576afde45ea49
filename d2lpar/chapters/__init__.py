"""What one chapter uses: a module or a folder for each, under the name of the chapter."""
