import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):  # as in megatron/cpu_shim.py, before which tests import megatron.core
    typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]
