"""Former names of the protocols of storage adapters. Deprecated: each protocol has a package of its own."""

import sys
import warnings
from importlib import import_module

_NEW_NAMES = {
    "batches": "freshet.batches.stream",
    "eventlog": "freshet.log",
    "rowservice": "freshet.rows.service",
    "rowstore": "freshet.rows.store",
    "versions": "freshet.versions",
}

warnings.warn(
    "freshet.seams is deprecated; import "
    + ", ".join(f"{new} instead of {__name__}.{old}" for old, new in _NEW_NAMES.items()),
    DeprecationWarning,
    stacklevel=2,
)
for _old, _new in _NEW_NAMES.items():
    sys.modules[f"{__name__}.{_old}"] = import_module(_new)
