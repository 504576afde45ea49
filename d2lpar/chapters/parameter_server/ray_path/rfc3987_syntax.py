"""Hide the package rfc3987_syntax from Ray's processes.

Ray imports jsonschema, which imports rfc3987_syntax if Jupyter has installed it: a second in every
process. Without it jsonschema does not check the syntax of IRIs.
"""

raise ImportError("not needed in Ray's processes")
