"""Loaded before pytest's other plugins, by `-p tests.start`: nothing builds grammars that no test needs.

jsonschema, which nbval imports, checks internationalized addresses with rfc3987_syntax where that is installed. Its
import takes 3 seconds in each process, and no schema here has such addresses.
"""

import sys

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as if it were not installed
