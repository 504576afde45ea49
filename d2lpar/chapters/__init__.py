"""What single chapters use: `d2lpar.chapters.<name>` has the code of the chapter <name>.

A module with one subject; a folder where there are several, whose `__init__` has all public names,
so that a chapter imports from `d2lpar.chapters.<name>` in either case.
"""
