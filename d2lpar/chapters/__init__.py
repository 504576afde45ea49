"""What single chapters use: `d2lpar.chapters.<name>` has the code of the chapter <name>.

A module, or where it would be long a folder, whose `__init__` has all public names, so that a
chapter imports from `d2lpar.chapters.<name>` in either case.
"""
