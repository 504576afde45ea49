"""Stands before the package of this name on the path of Ray's processes.

Ray imports jsonschema, which imports rfc3987_syntax where Jupyter has installed it, and that takes
a second in every process. jsonschema does without it: it then does not check the syntax of IRIs.
"""

raise ImportError("not needed in Ray's processes")
